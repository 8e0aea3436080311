//! Who runs in the next forward, and who gives up pages for it. Pure.

use super::pages::pages_for;
use crate::request::RequestId;

/// A request owned here, as planning sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    pub id: RequestId,
    /// Tokens of the sequence, provisional ones included.
    pub len: usize,
    /// Tokens with K/V here.
    pub kv_len: usize,
    /// Provisional tokens to sample at as well.
    pub verify: usize,
    /// Pages held.
    pub pages: usize,
    /// Pages that come free when it gives up its own, after all [`Pending`] and all younger ones have.
    pub freed: usize,
    /// None of its rows has been computed since it had no pages: what it holds comes from the cache.
    pub entering: bool,
}

/// A replica whose request lives elsewhere just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pending {
    pub id: RequestId,
    /// Pages that come free when it gives up its own, after all before it have.
    pub freed: usize,
}

/// Bounds of one forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most rows of all requests; exceeded only by a single verification that cannot be cut.
    pub max_rows: usize,
    /// Most rows of one request.
    pub prefill_chunk: usize,
}

/// The rows of one request: positions `start..end`, the last `sampled` of them sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub id: RequestId,
    pub start: usize,
    pub end: usize,
    pub sampled: usize,
}

/// What the next forward does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub run: Vec<Run>,
    /// Pending replicas and owned requests that lose their K/V first; they keep their tokens.
    pub retract: Vec<RequestId>,
    pub preempt: Vec<RequestId>,
}

/// Rows of one request within `budget` rows, or `None` if not one fits.
fn rows(ready: &Ready, chunk: usize, budget: usize, alone: bool) -> Option<Run> {
    // Sampling at position p tells the token at p + 1, so the last row is always computed, and a
    // verification computes one row more than it has provisional tokens.
    let sampled = ready.verify + 1;
    let first_sampled = ready.len.checked_sub(sampled)?;
    let start = ready.kv_len.min(first_sampled);
    // Sampled rows are no prompt: only the budget bounds them.
    let allowed = if start == first_sampled { budget } else { chunk.min(budget) };
    if ready.len - start <= allowed {
        return Some(Run { id: ready.id, start, end: ready.len, sampled });
    }
    // A chunk. The sampled rows stay together for the last one.
    let end = (start + allowed).min(first_sampled);
    if end > start {
        return Some(Run { id: ready.id, start, end, sampled: 0 });
    }
    alone.then_some(Run { id: ready.id, start, end: ready.len, sampled })
}

impl Plan {
    /// Plan one forward in place of the last. `ready` oldest first, `pending` in the order in which they are
    /// retracted, `free` pages of the pool.
    ///
    /// The oldest request always runs: it may take the pages of every pending replica and of every
    /// younger request, and admission made sure that it fits an empty pool.
    pub fn form(&mut self, ready: &[Ready], pending: &[Pending], mut free: usize, limits: Limits) {
        let Self { run: runs, retract, preempt } = self;
        runs.clear();
        retract.clear();
        preempt.clear();
        let mut budget = limits.max_rows.max(1);
        let mut pending = pending.iter();
        // Requests at `young..` have been preempted.
        let mut young = ready.len();
        // Once an older request waits for pages, younger ones must not take any.
        let mut starved = false;
        for (i, request) in ready.iter().enumerate() {
            if i >= young {
                break;
            }
            let Some(run) = rows(request, limits.prefill_chunk.max(1), budget, runs.is_empty()) else { continue };
            let more = pages_for(run.end).saturating_sub(request.pages);
            if more > 0 && starved {
                continue;
            }
            // A younger request that cannot get all its pages would lose them again to an older one.
            let spare = || free + pending.as_slice().iter().map(|p| p.freed).sum::<usize>();
            if i > 0 && request.entering && pages_for(request.len) > request.pages + spare() {
                starved = true;
                continue;
            }
            while free < more {
                if let Some(replica) = pending.next() {
                    retract.push(replica.id);
                    free += replica.freed;
                } else if young > i + 1 {
                    young -= 1;
                    if ready[young].pages > 0 {
                        preempt.push(ready[young].id);
                        free += ready[young].freed;
                    }
                } else {
                    break;
                }
            }
            if free < more {
                starved = true;
                continue;
            }
            free -= more;
            budget = budget.saturating_sub(run.end - run.start);
            runs.push(run);
            if budget == 0 {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { max_rows: 64, prefill_chunk: 16 };

    fn ready(id: RequestId, len: usize, kv_len: usize, pages: usize) -> Ready {
        Ready { id, len, kv_len, verify: 0, pages, freed: pages, entering: pages == 0 }
    }

    fn plan(ready: &[Ready], pending: &[Pending], free: usize, limits: Limits) -> Plan {
        let mut plan = Plan::default();
        plan.form(ready, pending, free, limits);
        plan
    }

    #[test]
    fn decode_extend_and_prefill_are_rows() {
        let plan = plan(&[ready(1, 20, 19, 2), ready(2, 20, 16, 1), ready(3, 40, 0, 0)], &[], 10, LIMITS);
        let run = |id, start, end, sampled| Run { id, start, end, sampled };
        assert_eq!(plan.run, [run(1, 19, 20, 1), run(2, 16, 20, 1), run(3, 0, 16, 0)]);
    }

    #[test]
    fn a_full_cursor_runs_the_last_row_again() {
        assert_eq!(plan(&[ready(1, 20, 20, 2)], &[], 0, LIMITS).run, [Run { id: 1, start: 19, end: 20, sampled: 1 }]);
    }

    #[test]
    fn verification_rows_stay_together() {
        let request = Ready { verify: 3, ..ready(1, 20, 0, 0) };
        let first = plan(&[request], &[], 10, LIMITS).run;
        assert_eq!(first, [Run { id: 1, start: 0, end: 16, sampled: 0 }]);
        let second = plan(&[Ready { kv_len: 16, ..request }], &[], 10, LIMITS).run;
        assert_eq!(second, [Run { id: 1, start: 16, end: 20, sampled: 4 }]);
        let tight = Limits { max_rows: 2, prefill_chunk: 2 };
        assert_eq!(plan(&[Ready { kv_len: 16, ..request }], &[], 10, tight).run, second);
    }

    #[test]
    fn pending_replicas_go_first_then_the_youngest() {
        let requests = [ready(1, 33, 32, 2), ready(5, 20, 19, 2), ready(9, 20, 19, 2)];
        let one = plan(&requests, &[Pending { id: 3, freed: 2 }], 0, LIMITS);
        assert_eq!((one.retract, one.preempt, one.run.len()), (vec![3], vec![], 3));
        let two = plan(&requests, &[], 0, LIMITS);
        assert_eq!((two.retract, two.preempt), (vec![], vec![9]));
        assert_eq!(two.run.iter().map(|r| r.id).collect::<Vec<_>>(), [1, 5]);
    }

    #[test]
    fn the_young_cannot_take_what_the_old_waits_for() {
        let requests = [ready(1, 16, 15, 1), ready(5, 65, 64, 4), ready(9, 1, 0, 0)];
        // 5 needs a page and nobody younger has one; 9 must not take the last page either.
        let plan = plan(&requests, &[], 0, LIMITS);
        assert_eq!(plan.run.iter().map(|r| r.id).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn the_young_start_only_with_room_for_all_their_tokens() {
        let requests = [ready(1, 16, 15, 1), ready(5, 64, 0, 0)];
        let ids = |free| plan(&requests, &[], free, LIMITS).run.iter().map(|r| r.id).collect::<Vec<_>>();
        assert_eq!((ids(3), ids(4)), (vec![1], vec![1, 5]));
        let retracting = plan(&requests, &[Pending { id: 7, freed: 2 }], 0, LIMITS);
        assert_eq!(retracting.run.len(), 1);
    }

    #[test]
    fn cached_pages_need_no_room_and_shared_ones_give_none() {
        let cached = Ready { entering: true, ..ready(5, 64, 48, 3) };
        let ids = |free| plan(&[ready(1, 16, 15, 1), cached], &[], free, LIMITS).run.len();
        assert_eq!((ids(0), ids(1)), (1, 2));
        // All pages of 7 and one of 6 are those of others.
        let young = [Ready { freed: 1, ..ready(6, 20, 19, 2) }, Ready { freed: 0, ..ready(7, 20, 19, 2) }];
        let plan = plan(&[ready(1, 17, 16, 1), young[0], young[1]], &[], 0, LIMITS);
        assert_eq!((plan.preempt, plan.run.len()), (vec![7, 6], 1));
    }

    #[test]
    fn chunks_do_not_bound_verification() {
        let request = Ready { verify: 8, ..ready(1, 20, 0, 0) };
        let limits = Limits { max_rows: 40, prefill_chunk: 4 };
        let two = [Ready { kv_len: 11, pages: 1, ..request }, Ready { id: 2, kv_len: 11, pages: 1, ..request }];
        assert_eq!(plan(&two, &[], 10, limits).run.iter().map(|r| r.sampled).collect::<Vec<_>>(), [9, 9]);
    }

    #[test]
    fn the_row_budget_is_kept() {
        let limits = Limits { max_rows: 20, prefill_chunk: 16 };
        let plan = plan(&[ready(1, 40, 0, 0), ready(2, 40, 0, 0), ready(3, 5, 4, 1)], &[], 10, limits);
        assert_eq!(plan.run.iter().map(|r| r.end - r.start).collect::<Vec<_>>(), [16, 4]);
    }
}
