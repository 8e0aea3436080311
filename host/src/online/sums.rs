//! From what models have observed to what the tuner reads. Pure.

use tokenrouter_batching::online::Seen;

use crate::subserver::observed::Observed;

/// Readings of all models, one after the other.
#[derive(Clone, Debug)]
pub struct Sums {
    before: Vec<Observed>,
    /// By model: share of the new requests that begin there.
    begin: Vec<f64>,
    seen: Vec<Seen>,
}

impl Sums {
    /// `entry`: where requests begin until some have.
    pub fn new(models: usize, entry: usize) -> Self {
        let begin = (0..models).map(|model| f64::from(u8::from(model == entry))).collect();
        Self { before: vec![Observed::default(); models], begin, seen: vec![Seen::none(models); models] }
    }

    /// Sums since the start, by model, with another reading.
    pub fn add(&mut self, observed: Vec<Observed>) -> &[Seen] {
        let since = |now: u64, before: u64| now.saturating_sub(before) as f64;
        let begun: Vec<f64> = observed.iter().zip(&self.before).map(|(now, old)| since(now.begun, old.begun)).collect();
        let all: f64 = begun.iter().sum();
        if all > 0.0 {
            self.begin = begun.into_iter().map(|begun| begun / all).collect();
        }
        for (model, (now, old)) in observed.iter().zip(&self.before).enumerate() {
            let seen = &mut self.seen[model];
            let handed = |to: usize| since(now.to[to], old.to.get(to).copied().unwrap_or(0));
            let handed: Vec<f64> = (0..now.to.len()).map(handed).collect();
            let ended = since(now.finished, old.finished);
            // A thread may be between two of its sums; the next reading has the rest.
            let stayed = since(now.evaluated, old.evaluated) - handed.iter().sum::<f64>() - ended;
            for (to, (routed, handed)) in seen.routed.iter_mut().zip(handed).enumerate() {
                *routed += handed + ended * self.begin[to] + if to == model { stayed.max(0.0) } else { 0.0 };
            }
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
    fn where_requests_end_the_next_begin() {
        let mut sums = Sums::new(2, 1);
        let observed = |evaluated, to: [u64; 2], finished, begun| Observed {
            evaluated,
            to: to.to_vec(),
            finished,
            begun,
            committed: 2 * evaluated,
            sizes: vec![Steps::one(6.0, 1.0)],
            ..Observed::default()
        };
        let seen = sums.add(vec![observed(20, [0, 6], 0, 0), observed(6, [5, 0], 1, 0)]);
        assert_eq!((&seen[0].routed[..], &seen[1].routed[..]), (&[14.0, 6.0][..], &[5.0, 1.0][..]));
        assert_eq!((seen[0].tokens, seen[0].sizes[0].steps), (40.0, 1.0));
        // Three of four begin at the first model. What an earlier reading was given stays.
        let seen = sums.add(vec![observed(20, [0, 6], 0, 3), observed(10, [5, 0], 5, 1)]);
        assert_eq!((&seen[0].routed[..], &seen[1].routed[..]), (&[14.0, 6.0][..], &[8.0, 2.0][..]));
    }

    #[test]
    fn a_reading_between_two_sums_does_no_harm() {
        let mut sums = Sums::new(2, 0);
        let observed = |evaluated, handed| Observed { evaluated, to: vec![0, handed], ..Observed::default() };
        let seen = sums.add(vec![observed(4, 5), observed(0, 0)]);
        assert_eq!(seen[0].routed, [0.0, 5.0]);
    }
}
