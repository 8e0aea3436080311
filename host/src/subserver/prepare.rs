//! What a forward is to compute: pages from the cache, the plan, and what its rows are asked for.

use tokenrouter_plugin_api::SignalSet;

use super::SubServer;
use super::pages::pages_for;
use super::plan::{Pending, Ready, Run};
use super::replica::Replica;
use super::step::{Stepped, Work};
use crate::runner::SignalRequest;

impl SubServer {
    /// Take from the cache what owned requests lack, the oldest first, as far as they then fit.
    fn adopt(&mut self) {
        let Self { replicas, owned, pool, counters, .. } = self;
        // Pages that older requests still need, and those that pending replicas could give.
        let (mut promised, mut pending) = (0, None);
        for (place, id) in owned.iter().enumerate() {
            let lacking = |r: &Replica| pages_for(r.tokens.len()).saturating_sub(r.pages.ids().len());
            if replicas.get(id).is_some_and(Replica::lacks_a_page) {
                let held = |r: &Replica| if r.owned { 0 } else { r.pages.ids().len() };
                let pending = *pending.get_or_insert_with(|| replicas.values().map(held).sum::<usize>());
                let Some(replica) = replicas.get_mut(id) else { continue };
                let enters = replica.pages.ids().is_empty();
                let (queried, found) = replica.adopt();
                // One that waits for room must not keep pages from others meanwhile, nor may younger ones.
                if enters && place > 0 && promised + lacking(replica) > pool.available() + pending {
                    replica.retract();
                    break;
                }
                counters.prefix_queried += queried as u64;
                counters.prefix_found += found as u64;
            }
            promised += replicas.get(id).map_or(0, lacking);
        }
    }

    /// Say who runs, after taking from the cache what is there.
    pub(super) fn plan(&mut self, work: &mut Work) {
        let Work { ready, plan, .. } = work;
        if !self.list(ready) {
            self.adopt();
            self.list(ready);
        }
        let free = self.pool.available();
        let wanted: usize = ready.iter().map(|r| pages_for(r.len).saturating_sub(r.pages)).sum();
        if wanted <= free {
            return plan.form(ready, &[], free, self.limits);
        }
        let owned = self.owned.iter().rev().filter_map(|id| self.replicas.get(id));
        let mut others: Vec<&Replica> =
            self.replicas.values().filter(|r| !r.owned && !r.pages.ids().is_empty()).collect();
        others.sort_unstable_by_key(|r| std::cmp::Reverse(r.spec.id));
        // In the order in which they would give up their pages.
        let order = others.iter().copied().chain(owned);
        let mut freed = self.pool.freed(order.map(|r| &r.pages)).into_iter();
        let pending: Vec<Pending> =
            others.iter().zip(&mut freed).map(|(r, freed)| Pending { id: r.spec.id, freed }).collect();
        ready.iter_mut().rev().zip(freed).for_each(|(ready, freed)| ready.freed = freed);
        plan.form(ready, &pending, free, self.limits);
    }

    /// Enter the owned requests in `ready`. False if one of them may find pages in the cache.
    fn list(&self, ready: &mut Vec<Ready>) -> bool {
        let mut complete = true;
        let replicas = self.owned.iter().filter_map(|id| self.replicas.get(id));
        ready.clear();
        ready.extend(replicas.inspect(|r| complete &= !r.lacks_a_page()).map(|r| r.ready(0)));
        complete
    }

    /// Give each run its pages: the plan counted them, so all get theirs. Tells what will be computed, and
    /// everything that the routes of the sampled requests ask for.
    pub(super) fn prepare(&mut self, runs: &mut Vec<Run>) -> (Stepped, SignalRequest) {
        let Self { replicas, routes, .. } = self;
        let (mut stepped, mut request) = (Stepped::default(), SignalRequest::default());
        runs.retain(|run| {
            let Some(replica) = replicas.get_mut(&run.id) else { return false };
            if !replica.pages.grow_to(pages_for(run.end)) {
                return false;
            }
            stepped.requests += 1;
            stepped.rows += run.end - run.start;
            // A single row that is sampled is the last one.
            if run.sampled == 0 || run.end - run.start > 1 {
                let prompt = replica.prompt_len().saturating_sub(1);
                stepped.prompt_rows += prompt.min(run.end).saturating_sub(run.start);
            }
            if run.sampled > 0 {
                stepped.evaluated += 1;
                if let Some(attachment) = routes.get(replica.spec.new.route) {
                    request.add(attachment.requirements());
                }
                if replica.spec.new.return_signals {
                    request.scalars = SignalSet::ALL;
                }
            }
            true
        });
        if let Some(observer) = &self.observer {
            let wanted = observer.wanted();
            request.scalars = request.scalars | wanted.scalars;
            request.top_k = request.top_k.max(wanted.top_k.min(self.runner.info().vocab_size));
        }
        (stepped, request)
    }
}
