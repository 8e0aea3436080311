// R-Stitch: the rule of ../../src/lib.rs, with the same settings.

import { DROP, Signal, handOverIf, model, setting, signal } from "./block";
export { tr_block } from "./block";

const SMALL: u32 = 0;
const LARGE: u32 = 1;

export function tr_route(rows: i32): i32 {
  const here = model();
  const threshold = setting(0);
  const to = here == SMALL ? LARGE : SMALL;
  const leave = here == SMALL ? DROP : 0;
  for (let row = 0; row < rows; row++) {
    // NaN is not above any threshold.
    const uncertain = <f64>signal(Signal.entropy_norm, row) > threshold;
    handOverIf(uncertain == (here == SMALL), row, to, leave);
  }
  return rows;
}
