// What an operator may tell one worker. A viewer is told how it is done in a shell.

import {made} from "./dom.js";
import {ask} from "./connection.js";

export function orders(worker, role) {  // eslint-disable-line no-unused-vars
  return [];
}
