// The clients of the Tinker API: what they have trained and sampled, and what they wait for. A run with [tinker] has no
// train steps of its own, so the page hides what is about those.

import {made, table, fill, $} from "./dom.js";
import {bytes, count, long, NONE, seconds, usd} from "./format.js";

// Sections about train steps, their groups and their rewards.
const OF_TRAINING = ["curves-section", "staleness-section", "capacity-section", "samples-section"];

const short = session => session.slice(0, 8);
const sum = (rows, name) => rows.reduce((total, row) => total + row[name], 0);
const queue = each => each.operations_waiting || each.bytes_waiting ? `${count(each.operations_waiting)}, ${bytes(each.bytes_waiting)}` : "0";
const words = model => `${model.model.split(":").slice(1).join(":")}, ${model.rank === null ? "not made yet" : model.rank ? `rank ${model.rank}` : "full weights"}${model.running ? `, runs ${model.running}` : ""}`;

// The tiles of the run, by name, with a text below; null: the run has tasks instead.
export function clientTiles({tinker}) {
  if (!tinker) return null;
  const {callers, sessions} = tinker, total = name => count(sum(callers, name));
  return [
    ["sessions", count(sessions.length), `${total("models")} models`], ["optimizer steps", total("steps"), `${seconds(sum(callers, "train_s"))} of the learner`],
    ["tokens trained", total("trained_tokens"), ""], ["tokens sampled", total("sampled_tokens"), `${total("sequences")} sequences`],
    ["wait for the learner", total("operations_waiting"), "operations"], ["wait for workers", count(sum(sessions, "samples_waiting")), `${count(sum(sessions, "drawn"))} samples are drawn`],
  ];
}

export function drawClients({status: {tinker}}) {
  for (const id of OF_TRAINING) $(id).hidden = Boolean(tinker);
  $("clients-section").hidden = !tinker;
  if (!tinker) return;
  const held = tinker.held.map(({weights, version}) => `${weights} as v${version}`).join(", ");
  const names = tinker.sessions.reduce((text, {session}) => text.replaceAll(session, short(session)), held);
  $("clients-about").textContent = held ? `workers hold ${names}` : "no weights are held yet";
  const priced = tinker.sessions.some(each => each.cost_usd !== null);
  const columns = [
    ["client"], ["session"], ["age", true], ["heard", true], ["model"], ["steps", true], ["tokens trained", true], ["train time", true], ["operations wait", true], ["tokens sampled", true],
    ["drawn now", true], ["samples wait", true], ["for other weights", true], ["to score", true], ["samplers", true], ["checkpoints", true], ...(priced ? [["usd", true]] : []),
  ];
  const trained = each => [count(each.steps), count(each.trained_tokens), seconds(each.train_s), queue(each)];
  const rows = [...tinker.sessions].sort((one, other) => one.silent_s - other.silent_s).flatMap(each => [
    [
      each.caller, short(each.session), long(each.age_s), `${long(each.silent_s)} ago`, each.models.length > 1 ? `${each.models.length} models` : each.models.map(words)[0] ?? NONE, ...trained(each), count(each.sampled_tokens),
      ...["drawn", "samples_waiting", "other_weights", "unscored", "samplers", "checkpoints"].map(name => count(each[name])), ...(priced ? [each.cost_usd === null ? NONE : usd(each.cost_usd)] : []),
    ],
    ...(each.models.length > 1 ? each.models.map(model => ["", "", "", "", words(model), ...trained(model), ...Array(columns.length - 9).fill("")]) : []),
  ]);
  fill("clients", rows.length ? table(columns, rows) : made("p", {class: "dim"}, "No client has a session now."));
}
