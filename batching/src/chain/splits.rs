//! How the requests of a batch part.

/// Ways in which the requests of a batch can part: how many go to each model, and how probably.
pub(super) struct Splits {
    /// `models` counts for each way.
    pub counts: Vec<u32>,
    pub probabilities: Vec<f64>,
}

impl Splits {
    /// All multinomial outcomes of `batch` requests with a probability above `tail`, scaled to sum to 1.
    pub fn new(batch: usize, row: &[f64], log_factorials: &[f64], tail: f64) -> Self {
        let mut splits = Self { counts: Vec::new(), probabilities: Vec::new() };
        let mut counts = vec![0; row.len()];
        splits.extend(&mut counts, 0, batch, log_factorials[batch], row, log_factorials);
        let kept: Vec<bool> = splits.probabilities.iter().map(|p| *p > tail).collect();
        let mut keep = kept.iter();
        splits.counts = splits
            .counts
            .chunks(row.len())
            .filter(|_| keep.next().copied().unwrap_or(false))
            .flatten()
            .copied()
            .collect();
        let mut keep = kept.iter();
        splits.probabilities.retain(|_| keep.next().copied().unwrap_or(false));
        let sum: f64 = splits.probabilities.iter().sum();
        splits.probabilities.iter_mut().for_each(|p| *p /= sum);
        splits
    }

    fn extend(&mut self, counts: &mut [u32], model: usize, rest: usize, log: f64, row: &[f64], factorials: &[f64]) {
        let Some(&p) = row.get(model) else {
            if rest == 0 {
                self.counts.extend_from_slice(counts);
                self.probabilities.push(log.exp());
            }
            return;
        };
        let most = if p > 0.0 { rest } else { 0 };
        // The last model takes all that is left.
        let least = if row[model + 1..].iter().any(|p| *p > 0.0) { 0 } else { most };
        for count in least..=most {
            counts[model] = count as u32;
            let term = if count == 0 { 0.0 } else { count as f64 * p.ln() - factorials[count] };
            self.extend(counts, model + 1, rest - count, log + term, row, factorials);
        }
        counts[model] = 0;
    }
}

/// Ways to part at most `requests` requests among `models` models.
pub(super) fn combinations(requests: usize, models: usize) -> f64 {
    (1..=models).fold(1.0, |ways, i| ways * (requests + i) as f64 / i as f64)
}
