// Everything about the run as a whole: tiles, alerts, curves, money, work, versions, capacity, evaluations, faults.

import {bar, facts, fill, made, table, $} from "./dom.js";
import {Chart, KINDS, smoothed} from "./chart.js";
import {clientTiles} from "./clients.js";
import {bytes, count, long, NONE, number, percent, perHour, seconds, usd} from "./format.js";
import {refit} from "./workers.js";

const ALERTS_SHOWN = 3;  // alerts of one kind that are shown at first
const SMOOTH = 20;  // steps of a moving mean
const LEARNER_HERE_S = 10;
const PERIOD_STEPS = 20;  // a step's duration is the median over this many newest steps

const median = values => values.length ? [...values].sort((a, b) => a - b)[values.length >> 1] : null;
const sum = values => values.reduce((total, value) => total + value, 0);
const entries = counts => Object.entries(counts).filter(([, value]) => value);

// --- the history

// Rows of steps by name, from the answers of /v1/history.
export class History {
  constructor() {
    this.steps = [];
    this.rewound = null;
  }

  get newest() { return this.steps.at(-1)?.step ?? 0; }

  // False: steps were trained again, so the whole history must be asked for again.
  take({columns, rows, rewound}) {
    if (this.rewound !== null && this.rewound !== rewound) { this.steps = []; this.rewound = null; return false; }
    this.rewound = rewound;
    for (const row of rows) this.steps.push(Object.fromEntries(columns.map((name, at) => [name, row[at]])));
    return true;
  }

  points(name) { return this.steps.map(each => [each.step, each[name]]); }

  // Median seconds from commit to commit, over the newest steps.
  get period() {
    const found = this.steps.slice(-PERIOD_STEPS).filter(each => each.wait_s !== null).map(each => each.t_train_s + each.wait_s);
    return median(found);
  }
}

// --- curves

const CHARTS = {
  reward: new Chart("Reward, mean of a step", {show: value => number(value)}),
  evals: new Chart("Evaluations, held-out score", {show: value => number(value), named: true}),
  parts: new Chart("Parts of the reward, means of a step", {show: value => number(value), named: true}),
  tags: new Chart("Reward by tag, means of a step", {show: value => number(value), named: true}),
  entropy: new Chart("Entropy of the policy, nats/token", {show: value => `${number(value)} nats`, floor: 0}),
  kl: new Chart("KL, nats/token", {show: value => `${number(value, 4)} nats`, floor: 0, named: true}),
  grad_norm: new Chart("Gradient norm before the clip", {show: value => number(value), floor: 0}),
  loss: new Chart("Loss", {show: value => number(value, 4)}),
  mfu: new Chart("MFU, % of the devices' peak", {show: value => `${number(value, 1)} %`, floor: 0}),
  answers: new Chart("Answer length, tokens", {show: value => `${number(value, 1)} tokens`, floor: 0}),
  staleness: new Chart("Staleness, train steps", {show: value => `${number(value, 2)} steps`, floor: 0}),
  bubble: new Chart("Bubble, % of a step without training", {show: value => `${number(value, 1)} %`, floor: 0}),
  tokens: new Chart("Tokens written per second", {show: value => `${count(value)} tokens/s`, floor: 0}),
  t_bcast: new Chart("T_bcast, publish to serving, s", {show: seconds, floor: 0}),
  step: new Chart("Duration of a step, s", {show: seconds, floor: 0, named: true}),
};
// Each of these charts is shown once it has a value, because not every run has them.
const OPTIONAL = ["evals", "parts", "tags", "entropy", "kl", "grad_norm", "loss", "mfu"];
// The smallest width and the gap of charts and of tiles, in px. page.css has the same gaps.
const CHART = [336, 24], TILE = [135, 10];

export function showCharts() {
  fill("charts", Object.values(CHARTS).map(chart => chart.node));
  arrange();
  new ResizeObserver(arrange).observe($("charts"));
}

function arrange() {
  for (const name of OPTIONAL) CHARTS[name].node.hidden = !CHARTS[name].series.length;
  balance("charts", CHART);
}

// Give all rows nearly the same number of children, so that no row has a hole; the first rows may have one child less.
function balance(id, [least, gap]) {
  const shown = [...$(id).children].filter(child => !child.hidden);
  const rows = Math.ceil(shown.length / Math.max(1, Math.floor(($(id).clientWidth + gap) / (least + gap))));
  for (let row = 0, first = 0; row < rows; row++) {
    const wide = Math.floor((shown.length + row) / rows);
    for (const child of shown.slice(first, first += wide)) child.style.setProperty("--row", wide);
  }
}

// A line for each name in a column of the history. A cell of the column has values by name. The newest names are taken.
function lines(history, column) {
  const names = new Set();
  for (const step of [...history.steps].reverse()) for (const name of Object.keys(step[column] ?? {})) if (names.size < KINDS.length) names.add(name);
  return [...names].sort().map((name, at) => ({name, kind: KINDS[at], points: history.steps.map(each => [each.step, each[column]?.[name] ?? null])}));
}

export function drawCurves(history, staleness_max) {
  const reward = history.points("reward");
  const many = reward.length > 2 * SMOOTH;
  CHARTS.reward.set(many ? [{name: `mean of ${SMOOTH}`, points: smoothed(reward, SMOOTH)}, {name: null, points: reward, kind: "faint"}] : [{name: "reward", points: reward}]);
  CHARTS.parts.set(lines(history, "parts"));
  CHARTS.tags.set(lines(history, "reward_by_tag"));
  CHARTS.entropy.set([{name: "entropy", points: history.points("entropy")}]);
  CHARTS.kl.set([{name: "rollout to learner", points: history.points("kl_rollout")}, {name: "learner to base", points: history.points("kl_base"), kind: "second"}, {name: "learner to teacher", points: history.points("kl_teacher"), kind: "third"}]);
  CHARTS.grad_norm.set([{name: "gradient norm", points: history.points("grad_norm")}]);
  CHARTS.loss.set([{name: "loss", points: history.points("loss")}]);
  CHARTS.mfu.set([{name: "MFU", points: history.steps.map(each => [each.step, each.mfu === null ? null : 100 * each.mfu])}]);
  CHARTS.answers.set([{name: "answer length", points: history.steps.map(each => [each.step, each.trajectories ? each.tokens / each.trajectories : null])}]);
  CHARTS.staleness.set([{name: "staleness", points: history.points("staleness")}], [staleness_max, `S = ${staleness_max}`]);
  CHARTS.bubble.set([{name: "bubble", points: history.steps.map(each => [each.step, each.wait_s === null ? null : 100 * each.wait_s / Math.max(1e-9, each.wait_s + each.t_train_s)])}]);
  CHARTS.tokens.set([{name: "tokens/s", points: history.points("tokens_per_s")}]);
  const broadcasts = history.points("t_bcast_s").filter(([, value]) => value !== null);
  CHARTS.t_bcast.set([{name: "T_bcast", points: broadcasts, dots: broadcasts.length < 40}]);
  CHARTS.step.set([{name: "training", points: history.points("t_train_s")}, {name: "waiting", points: history.points("wait_s"), kind: "second"}]);
  arrange();
}

// found: rows of /v1/evaluations.
export function drawEvaluations(found) {
  const names = [...new Set(found.map(each => each.name))];
  CHARTS.evals.set(names.map((name, at) => ({name, kind: KINDS[at % KINDS.length], dots: true, points: found.filter(each => each.name === name).map(each => [each.version, each.mean]).sort((a, b) => a[0] - b[0])})));
  arrange();
}

// --- the run at a glance

const tile = (name, value, unit = "", more = "") => made("div", {}, more ? made("div", {class: "more"}, more) : null, made("dd", {}, value, unit ? made("small", {}, unit) : null), made("dt", {}, name));

export function drawTop(page) {
  const {now, status, history, workers} = page, last = history.steps.at(-1);
  const name = status.run.name || status.run_id, base = status.run.model.split("/").filter(Boolean).at(-1);
  document.title = `${status.tinker ? "" : `${now.committed_step} `}${name} \u2013 echo2d`;
  $("run-name").textContent = name;
  const tasks = status.run.tasks.map(task => task.name || task.kind).join(", ");
  $("run-about").textContent = [status.run.name ? status.run_id : null, tasks, base, status.tinker ? null : `S = ${status.staleness_max}, kappa = ${status.publish_every}, R = ${status.trajectories_per_step}`].filter(Boolean).join(" \u00b7 ");
  $("run-about").title = `run ${status.run_id}, epoch ${status.epoch}, model ${status.run.model || "not named"}, coordinator echo2d ${status.run.software}`;
  drawProgress(page);

  const period = history.period, cost = costs(page), joined = workers.filter(worker => worker.state === "joined");
  const working = joined.filter(worker => worker.active).length;
  const spread = last && last.staleness !== null ? number(last.staleness, 2) : NONE;
  const clients = clientTiles(status);
  fill("tiles", ...(clients ? clients.map(([name, value, more]) => tile(name, value, "", more)) : [
    tile("train steps", count(now.committed_step), "", period ? `one in ${seconds(period)}` : ""),
    tile("reward", last?.reward !== undefined ? number(last.reward) : NONE, "", history.steps.length > 2 * SMOOTH ? `${change(history)} in ${SMOOTH} steps` : ""),
    tile("bubble", now.bubble_ratio === null ? NONE : number(100 * now.bubble_ratio, 1), now.bubble_ratio === null ? "" : "%", "of the learner's time"),
    tile("written", page.tokens_per_s === null ? NONE : count(page.tokens_per_s), page.tokens_per_s === null ? "" : "tokens/s", `${count(now.tokens_under_way)} tokens under way`),
    tile("staleness, mean", spread, spread === NONE ? "" : "steps", `at most S = ${status.staleness_max}`)]),
    tile("T_bcast, median", seconds(status.t_bcast_s.median), "", `p95 ${seconds(status.t_bcast_s.p95)}`),
    tile("newest version", now.newest_version === null ? NONE : `v${now.newest_version}`, "", status.seed_alive ? "\u25CF seed is here" : "\u25B2 seed is away"),
    tile("workers", `${working} / ${joined.length}`, "", "work / are here"),
    clients ? null : tile("leases", count(now.leases), "", `${now.groups_in_flight} groups open`),
    cost.per_hour ? tile("cost", usd(cost.per_hour), "usd/h", period ? `${usd(cost.per_hour * period / 3600)} a step` : "") : null,
  );
  balance("tiles", TILE);
  const waits = provision(status, workers);
  if ($("bottleneck").textContent !== waits) $("bottleneck").textContent = waits;
}

function change(history) {
  const points = smoothed(history.points("reward"), SMOOTH).filter(([, y]) => y !== null);
  const difference = points.at(-1)[1] - (points.at(-1 - SMOOTH)?.[1] ?? points[0][1]);
  return `${difference < 0 ? "\u2212" : "+"}${number(Math.abs(difference))}`;
}

function drawProgress({now, status, history}) {
  const {steps, eta_s: told} = status.learner, left = steps === null ? null : steps - now.committed_step;
  $("progress").hidden = steps === null;
  if (steps === null) return;
  const eta = left <= 0 ? "finished" : history.period === null ? told : left * history.period;
  $("progress-bar").value = Math.min(1, now.committed_step / Math.max(1, steps));
  $("progress-words").textContent = `step ${count(now.committed_step)} of ${count(steps)}${eta === null ? "" : typeof eta === "string" ? `, ${eta}` : `, ${long(eta)} left`}`;
}

function provision({provision: {activation, bottleneck, mu_pool, mu_target, why}}, workers) {
  const sentence = `${bottleneck.text}.`;
  if (activation !== "auto") return sentence;
  const here = workers.filter(worker => worker.state === "joined"), working = here.filter(worker => worker.active);
  const aimed = mu_target === null ? "" : `; the target is ${perHour(mu_target)}`;
  return `${sentence} ${working.length} of ${here.length} workers work, ${perHour(mu_pool)} trajectories/h${aimed}${why && `; ${why}`}`;
}

// --- alerts

export function drawAlerts(status) {
  const said = JSON.stringify(status.alerts);
  if (said === drawAlerts.said) return;
  drawAlerts.said = said;
  const kinds = new Map();
  for (const alert of status.alerts) kinds.set(alert.kind, [...kinds.get(alert.kind) ?? [], alert]);
  const line = alert => made("li", {}, made("b", {"aria-hidden": "true"}, "!"), alert.sentence);
  fill("alerts", [...kinds.values()].flatMap(alike => {
    const first = alike.slice(0, ALERTS_SHOWN).map(line), more = alike.slice(ALERTS_SHOWN);
    if (!more.length) return first;
    const button = made("button", {type: "button", onclick: () => item.replaceWith(...more.map(line))}, `${count(more.length)} more like these`);
    const item = made("li", {}, button);
    return [...first, item];
  }));
}

// --- money

// What the run costs now, in usd.
export function costs({status}) {
  const boxes = status.costs.workers_usd_per_h, learner = status.provision.learner_usd_per_h;
  return {boxes, learner, per_hour: boxes + learner};
}

export function drawMoney(page) {
  const {status, history} = page, cost = costs(page), period = history.period, renting = status.renting;
  const priced = cost.per_hour || status.seed_usd_total || renting;
  const trained = page.workers.filter(worker => worker.rho !== null).map(worker => worker.rho);
  fill("money", priced ? facts([
    ["workers here, per hour", `${usd(cost.boxes)} usd`], ["learner, per hour", `${usd(cost.learner)} usd`], ["together", `${usd(cost.per_hour)} usd/h`],
    ["a step, at this rate", status.tinker ? null : period ? `${usd(cost.per_hour * period / 3600)} usd` : NONE],
    ["workers, since the coordinator started", `${usd(status.costs.workers_usd)} usd`], ["of it, a step", status.tinker ? null : status.costs.usd_per_step === null ? NONE : `${usd(status.costs.usd_per_step)} usd`],
    ["a trajectory, median worker", trained.length ? `${usd(median(trained))} usd` : null],
    ["seed sent", `${bytes(status.seed_sent_bytes)}, ${usd(status.seed_usd_total)} usd`], ["of it, newest version", Object.keys(status.seed_usd).length ? `${usd(Object.values(status.seed_usd).at(-1))} usd` : null],
    ...(renting ? [["rented now", `${usd(renting.usd_per_h)} of at most ${usd(renting.usd_per_h_max)} usd/h`], ["spent on boxes", `${usd(renting.spent_usd)} of ${usd(renting.usd_total_max)} usd`], ["set aside, left", `${usd(renting.set_aside_usd)}, ${usd(renting.left_usd)} usd`]] : []),
  ]) : made("p", {class: "dim"}, "Nothing has a price. The config sets prices of boxes in [[price]], that of the learner in activation.learner_usd_per_h."));
  $("boxes-section").hidden = !renting?.boxes.length;
  if (renting) fill("boxes", table([["box"], ["worker"], ["provider"], ["offer"], ["state"], ["usd / h", true], ["age", true], ["life left", true], ["cost, usd", true], ["why it goes", false, true]], renting.boxes.map(box => [box.label, box.worker || NONE, box.provider, box.offer, box.state, usd(box.usd_per_h), long(box.age_s), long(box.life_left_s), usd(box.cost_usd), box.why])));
}

// --- the rest

export function drawRest(page) {
  const {now, status} = page, {trajectories, groups, provision: capacity} = status;
  const total = sum(Object.values(status.staleness));
  fill("staleness", total ? table([["age"], [""], ["share", true]], Object.entries(status.staleness).map(([age, n]) => [age, bar(n / total, `${percent(n / total, 1)} of staleness ${age}`), percent(n / total, 1)])) : made("p", {class: "dim"}, "no step yet"));
  const lengths = status.answer_tokens, reasons = pairs => entries(pairs).map(([name, value]) => `${name} ${count(value)}`).join(", ");
  fill("groups", facts([
    ...(status.tinker ? [] : [["groups in flight", count(now.groups_in_flight)], ["groups ready for a batch", count(now.groups_buffered)], ["groups queued, in all", count(groups.queued)],
    ["trajectories trained, dropped, in all", `${count(status.totals.trained)}, ${count(status.totals.dropped)}`], ["since the coordinator started", `${count(now.trajectories_trained)}, ${count(now.trajectories_dropped)}`], ["groups without variance", status.flat_groups.length ? percent(status.flat_groups.at(-1)) : null], ["groups dropped", reasons(status.groups_dropped) || null],
    ["results refused", reasons(status.results_refused) || "none"], ["tokens accepted", count(now.tokens_accepted)], ["tokens wasted", reasons(status.wasted_tokens) || null],
    ["tokens of an answer", entries(lengths).map(([name, value]) => `${name} ${count(value)}`).join(", ") || null],
    ["handed over", `${count(status.handed_over.partials)} samples, ${count(status.handed_over.tokens)} tokens`],
    ["open step, checkpoint", `${status.open_step}, ${status.checkpoint_step}`]]),
    ["learner", !status.learner.heard ? "not heard yet" : status.learner.silent_s < LEARNER_HERE_S ? "is here" : `silent for ${long(status.learner.silent_s)}`],
    ["its name, its echo2d", [status.learner.name, status.learner.software].filter(Boolean).join(", ") || null],
    ["learner: training, waiting", status.tinker ? null : `${long(status.learner_train_s)}, ${long(status.learner_wait_s)}`],
  ]));
  const versions = Object.keys(status.version_bytes).map(Number), newest = Math.max(...versions), sizes = status.version_bytes[newest];
  fill("bytes", facts([
    ["versions published, in all", count(status.totals.published)], ["since the coordinator started", count(status.versions_published)], ["on the wire, in full", `${bytes(status.wire_bytes)}, ${bytes(status.full_bytes)}`],
    ["share of the full size", status.full_bytes ? percent(status.wire_bytes / status.full_bytes, 1) : NONE],
    [versions.length ? `version ${newest}` : "", versions.length ? `${bytes(sizes.wire_bytes)} of ${bytes(sizes.full_bytes)}` : null],
    ["sent by the seed", versions.length && status.seed_copies[newest] !== undefined ? `${number(status.seed_copies[newest], 1)} times` : null],
    ["T_verify, median, p95", `${seconds(status.t_verify_s.median)}, ${seconds(status.t_verify_s.p95)}`], ["T_bcast, median, p95", `${seconds(status.t_bcast_s.median)}, ${seconds(status.t_bcast_s.p95)}`],
    ["refit, median", refit(status.refit_pause_s.median, status.recompute_s.median)], ["tokens computed again", count(status.tokens_recomputed)],
    ["seed", status.seed_alive ? `here${status.seed_uplink ? `, uplink ${bytes(status.seed_uplink)}/s` : ""}` : "away"],
    ["catching up", status.catch_ups.map(form => `v${form.version} ${form.form.slice(0, 6)}, ${bytes(form.wire_bytes ?? form.full_bytes)}`).join("; ") || null],
    ["relays", status.relays.length ? status.relays.map(relay => `${relay.name}${relay.alive ? "" : " (away)"}`).join(", ") : null],
    ["waits to be sent", status.broadcast?.waiting_version ? `v${status.broadcast.waiting_version}` : null],
  ]));
  const rate = mu => mu === null ? NONE : `${perHour(mu)} trajectories/h`;
  const wanted = capacity.estimates, known = each => each === null ? null : each;
  fill("capacity", facts([
    ["made by the active", rate(capacity.mu_pool)], ["the learner needs", rate(capacity.mu_min)],
    ["the target", capacity.mu_target === null ? null : rate(capacity.mu_target)], ["all that are here", rate(capacity.mu_available)],
    ["bubble now, predicted", `${percent(capacity.bubble, 1)}, ${percent(capacity.bubble_predicted, 1)}`],
    ["T_train", known(wanted.t_train_s) && seconds(wanted.t_train_s.value)], ["an answer takes", known(wanted.t_gen_s) && seconds(wanted.t_gen_s.value)],
    ["thrown away", known(wanted.discarded) && percent(wanted.discarded.value, 1)], ["changes of the active set", capacity.activation === "auto" ? count(capacity.changes) : null],
    ["infeasible, because", capacity.why_not || null],
  ]));
  const audit = status.audit;
  $("audit-section").hidden = audit === null;
  if (audit) fill("audit", facts([
    ["auditors", audit.auditors ? String(audit.auditors) : "\u25B2 none is here"], ["parts scored, skipped", `${count(audit.scored)}, ${count(audit.skipped)}`], ["waiting", `${count(audit.pending)} parts, ${count(audit.waiting)} answers`],
    ["a verdict takes", seconds(audit.delay_s)], ["limits learnt", percent(audit.learnt)], ["of mixed KV caches", audit.learnt_mixed === null ? null : percent(audit.learnt_mixed)], ["trusted workers", audit.trusts ? "yes" : "none"], ["held back", audit.held_back.join(", ") || null],
  ]));
  const calls = status.gateway;
  $("gateway-section").hidden = !calls.calls && !entries(calls.ended).length;
  fill("gateway", facts([["open calls", count(calls.calls)], ["samples running, waiting", `${count(calls.running)}, ${count(calls.waiting)}`], ["tokens", count(calls.tokens)], ["ended", reasons(calls.ended) || "none"], ["handed over", count(calls.handed_over)]]));
  drawScores(status);
  drawTasks(status);
  drawFaults(status);
}

function drawScores({evaluations}) {
  $("evaluations-section").hidden = !evaluations.length;
  fill("evaluations", table([["evaluation"], ["version", true], ["score", true], ["questions", true], ["cut off", true], ["tokens", true], ["under way", true]], evaluations.map(each => [
    each.name, each.version === null ? NONE : `v${each.version}`, each.mean === null ? NONE : number(each.mean) + (each.se === null ? "" : ` \u00b1 ${number(each.se)}`), `${each.rows} of ${each.of}`,
    percent(each.truncated, 1), count(each.tokens), each.open_version === null ? NONE : `v${each.open_version}: ${each.open_answers} / ${each.open_of}`,
  ])));
}

function drawTasks({tasks}) {
  const playing = tasks.some(task => task.episodes);
  $("tasks-section").hidden = tasks.length < 2 && !playing;
  const extra = playing ? [["episodes wait for it", true], ["episodes wait for a slot", true], ["episodes offered to agents", true], ["a step takes it", true], ["p90", true]] : [];
  fill("tasks", table([["task"], ["share", true], ["groups in flight", true], ["rows retired", true], ["prompts passed over", true], ...extra], tasks.map(({name, weight, in_flight, retired, passed, episodes}) => [
    name || NONE, percent(weight), count(in_flight), count(retired), count(passed),
    ...(playing ? episodes ? [count(episodes.parked), count(episodes.waiting), count(episodes.offered), seconds(episodes.tool_s_median), seconds(episodes.tool_s_p90)] : Array(5).fill(NONE) : []),
  ])));
}

function drawFaults({faults, fault_counts: counts, refused_peers: refused, peer_faults: broken}) {
  $("faults-section").hidden = !faults.length && !refused.length;
  $("faults-about").textContent = [...entries(counts).map(([kind, times]) => `${kind} ${count(times)}`), broken ? `broken messages ${count(broken)}` : null, ...refused.map(each => `${each.name || each.id} is refused for ${long(each.refused_s)}`)].filter(Boolean).join(", ");
  fill("faults", table([["last"], ["kind"], ["times", true], ["what", false, true]], [...faults].reverse().map(({kind, text, times, age_s}) => [`${long(age_s)} ago`, kind, count(times), text])));
}
