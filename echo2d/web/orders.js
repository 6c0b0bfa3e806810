// An operator's orders to one worker: take no new leases (cordon), or also end once it holds no samples (drain).
//
//     POST /v1/workers/{id}/cordon, uncordon, drain    needs an operator's token

import {made} from "./dom.js";
import {ask, Refusal} from "./connection.js";

const ORDERS = {
  drain: "It takes no new leases, finishes what it holds, and ends.",
  cordon: "It takes no new leases, and stays.",
  uncordon: "It works again; a drain that has not ended is called off.",
};

// The buttons for this worker. A viewer sees no buttons, but is told which token is needed.
export function orders(worker, role) {
  if (role !== "operator") return [made("p", {class: "dim"}, "To take it out of service, log in with an operator's token.")];
  const said = made("p", {role: "status"}), asked = made("div", {class: "row"});
  const names = worker.cordoned || worker.draining ? ["uncordon", "drain"] : ["drain", "cordon"];
  // An order needs a second click, so that no order is sent by mistake.
  const sure = name => {
    const yes = made("button", {type: "button", onclick: () => { asked.replaceChildren(); send(worker, name, said); }}, `${name} ${worker.name}`);
    const no = made("button", {type: "button", onclick: () => { asked.replaceChildren(); said.textContent = ""; }}, "no");
    said.textContent = ORDERS[name];
    asked.replaceChildren(yes, no);
    yes.focus();
  };
  return [made("div", {class: "buttons"}, names.map(name => made("button", {type: "button", title: ORDERS[name], onclick: () => sure(name)}, name))), said, asked];
}

async function send(worker, name, said) {
  said.textContent = "sent...";
  try {
    const {leased} = await ask(`/v1/workers/${encodeURIComponent(worker.id)}/${name}`, {method: "POST", body: {}});
    said.textContent = `${name}: done${leased ? `; it still holds ${leased} samples` : ""}.`;
  } catch (error) {
    said.textContent = error instanceof Refusal ? error.message : "The coordinator does not answer.";
  }
}
