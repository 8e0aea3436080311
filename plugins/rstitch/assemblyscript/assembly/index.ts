// R-Stitch: the rule of ../../src/lib.rs, with the same settings.

import { DROP, Signal, above4, handOver4If, model, setting } from "./block";
export { tr_block } from "./block";

const SMALL: u32 = 0;
const LARGE: u32 = 1;

export function tr_route(rows: i32): i32 {
  const here = model();
  const threshold = setting(0);
  const to = here == SMALL ? LARGE : SMALL;
  const leave = here == SMALL ? DROP : 0;
  // The small model hands over where it is uncertain, the large one where it is not.
  const sure = here == SMALL ? i32x4.splat(0) : i32x4.splat(-1);
  for (let row = 0; row < rows; row += 4) {
    handOver4If(v128.xor(above4(Signal.entropy_norm, row, threshold), sure), row, to, leave);
  }
  return rows;
}
