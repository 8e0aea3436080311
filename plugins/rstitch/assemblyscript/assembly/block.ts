// The block that the server and the module share. Offsets are those of docs/policies.md; a column has room for 256
// values of 4 bytes.

/** Where the block begins. */
export const tr_block: usize = memory.data(0x3400, 16);

/** Number of the model that this instance is at: its place among `roles` of policy.json. */
// @ts-ignore: decorator
@inline export function model(): u32 {
  return load<u32>(tr_block);
}

/** The setting with this place in policy.json; `true` is 1. */
// @ts-ignore: decorator
@inline export function setting(place: u32): f64 {
  return load<f64>(tr_block + (<usize>place << 3), 0x100);
}

/** Columns of signals. Only those that policy.json asks for are written; NaN means "no signal". */
export const enum Signal {
  entropy = 0x0c00,
  entropy_norm = 0x1000,
  top1_prob = 0x1400,
  margin = 0x1800,
  logsumexp = 0x1c00,
  candidate_prob = 0x2000,
}

/** What a signal is in a row. */
// @ts-ignore: decorator
@inline export function signal(column: Signal, row: i32): f32 {
  return load<f32>(tr_block + <usize>column + (<usize>row << 2));
}

/** The candidate is dropped: the other model writes its position. */
export const DROP: u32 = 0x80000000;

/** In which of four rows, from `row`, a signal is above a threshold: all bits of a lane or none. NaN is above none. */
// @ts-ignore: decorator
@inline export function above4(column: Signal, row: i32, threshold: f64): v128 {
  const at = tr_block + <usize>column + (<usize>row << 2), limit = f64x2.splat(threshold);
  const first = f64x2.gt(f64x2.promote_low_f32x4(v128.load64_zero(at)), limit);
  const last = f64x2.gt(f64x2.promote_low_f32x4(v128.load64_zero(at, 8)), limit);
  // Of each f64 one half.
  return v128.shuffle<i32>(first, last, 0, 2, 4, 6);
}

/** What [[handOver]] does with those of four rows, from `row`, whose lanes have all bits; the others stay. It has no
 * branch: which rows are handed over cannot be predicted. What is written for rows that do not exist, up to three, is
 * within the columns, and nobody reads it. */
// @ts-ignore: decorator
@inline export function handOver4If(when: v128, row: i32, to: u32, leave: u32): void {
  const at = tr_block + (<usize>row << 2);
  v128.store(at, v128.and(when, i32x4.splat(to + 1)), 0x400);
  // Read only where the row is handed over.
  v128.store(at, i32x4.splat(leave), 0x800);
}

/** Hand a row over to a model. `leave`: `DROP` or 0, with the visit's budget of tokens, 0 for none. */
// @ts-ignore: decorator
@inline export function handOver(row: i32, to: u32, leave: u32): void {
  store<u32>(tr_block + (<usize>row << 2), to + 1, 0x400);
  store<u32>(tr_block + (<usize>row << 2), leave, 0x800);
}
