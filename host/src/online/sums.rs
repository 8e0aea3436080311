//! From what models have observed to what the tuner reads. Pure.

use tokenrouter_batching::online::Seen;

use crate::subserver::observed::Observed;

/// Readings of all models, one after the other.
#[derive(Clone, Debug)]
pub struct Sums {
    before: Vec<Observed>,
    /// By model: requests that were handed on or ended before their evaluation was counted. The next reading has it.
    ahead: Vec<f64>,
    seen: Vec<Seen>,
}

impl Sums {
    pub fn new(models: usize) -> Self {
        let (before, ahead) = (vec![Observed::default(); models], vec![0.0; models]);
        Self { before, ahead, seen: vec![Seen::none(models); models] }
    }

    /// Sums since the start, by model, with another reading.
    pub fn add(&mut self, observed: Vec<Observed>) -> &[Seen] {
        let since = |now: u64, before: u64| now.saturating_sub(before) as f64;
        for (model, (now, old)) in observed.iter().zip(&self.before).enumerate() {
            let (seen, ahead) = (&mut self.seen[model], &mut self.ahead[model]);
            let handed = |to: usize| since(now.to[to], old.to.get(to).copied().unwrap_or(0));
            let handed: Vec<f64> = (0..now.to.len()).map(handed).collect();
            let ended = since(now.finished, old.finished);
            let stayed = since(now.evaluated, old.evaluated) - handed.iter().sum::<f64>() - ended - *ahead;
            *ahead = (-stayed).max(0.0);
            seen.routed.iter_mut().zip(handed).for_each(|(routed, handed)| *routed += handed);
            seen.routed[model] += stayed.max(0.0);
            seen.ended += ended;
            seen.begun += since(now.begun, old.begun);
            seen.tokens += since(now.committed, old.committed);
            seen.sizes.clone_from(&now.sizes);
        }
        self.before = observed;
        &self.seen
    }
}

#[cfg(test)]
mod tests {
    use tokenrouter_batching::online::Steps;

    use super::*;

    #[test]
    fn readings_add_up() {
        let mut sums = Sums::new(2);
        let observed = |evaluated, to: [u64; 2], finished, begun| Observed {
            evaluated,
            to: to.to_vec(),
            finished,
            begun,
            committed: 2 * evaluated,
            sizes: vec![Steps::one(6.0, 1.0)],
            ..Observed::default()
        };
        sums.add(vec![observed(20, [0, 6], 0, 3), observed(6, [5, 0], 1, 0)]);
        let seen = sums.add(vec![observed(20, [0, 6], 0, 3), observed(10, [5, 0], 3, 1)]);
        assert_eq!((&seen[0].routed[..], &seen[1].routed[..]), (&[14.0, 6.0][..], &[5.0, 2.0][..]));
        assert_eq!((seen[0].ended, seen[1].ended, seen[0].begun, seen[1].begun), (0.0, 3.0, 3.0, 1.0));
        assert_eq!((seen[0].tokens, seen[0].sizes[0].steps), (40.0, 1.0));
    }

    #[test]
    fn a_reading_between_two_sums_is_made_up_for_by_the_next() {
        let mut sums = Sums::new(2);
        let observed = |evaluated, handed| Observed { evaluated, to: vec![0, handed], ..Observed::default() };
        assert_eq!(sums.add(vec![observed(4, 5), observed(0, 0)])[0].routed, [0.0, 5.0]);
        assert_eq!(sums.add(vec![observed(8, 5), observed(0, 0)])[0].routed, [3.0, 5.0]);
    }
}
