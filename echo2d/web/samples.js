// Prompts and answers of a step. They are read only while they are shown, and only with a token that allows it.

import {fill, made, table, $} from "./dom.js";
import {ask, Refusal} from "./connection.js";
import {number} from "./format.js";

const words = text => typeof text === "string" ? text : text.join(" ");

export class Samples {
  constructor() {
    this.step = null;  // null: the newest step
    this.shown = null;
    $("samples").addEventListener("toggle", () => this.look());
  }

  async look() {
    if (!$("samples").open) return;
    try {
      this._show(await ask(`/v1/samples${this.step === null ? "" : `?step=${this.step}`}`));
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      this.shown = null;
      fill("samples-steps");
      fill("samples-groups", made("p", {class: "dim"}, `${error.message}. Prompts and answers may be private; viewers see them if the coordinator's config has samples.viewers = true.`));
    }
  }

  _show({step, groups}) {
    const said = JSON.stringify([step, groups, this.step]);
    if (said === this.shown) return;
    this.shown = said;
    const go = (name, to) => made("button", {type: "button", onclick: () => { this.step = to; this.look(); }}, name);
    fill("samples-steps", step === null ? made("span", {class: "dim"}, "no step yet") : [go("\u2190 step before", Math.max(1, step - 1)), made("span", {}, `step ${step}`), this.step === null ? null : go("next step \u2192", step + 1), this.step === null ? null : go("newest", null), made("span", {class: "dim"}, groups.length ? "the worst groups first; long texts are cut" : "nothing is kept of this step")]);
    fill("samples-groups", groups.map(group => made("article", {}, made("pre", {}, words(group.prompt)), table([[`mean ${number(group.mean, 2)}`, true], ["version", true], ["end"], ["answer", false, true]], group.samples.map(each => [number(each.reward, 2), `v${each.versions[0]}`, each.finish, made("pre", {}, words(each.answer))])))));
  }
}
