//! What models have done: sums that only grow, so that an interval is the difference of two readings.

/// Milliseconds below which steps are taken for as long.
const SHORTEST: f64 = 1e-6;

/// Steps of one batch size. Overlap: milliseconds of a step in which other models ran; alone: the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Steps {
    pub steps: f64,
    pub overlap: f64,
    pub alone: f64,
    /// Of the share f of the step that overlaps, of f * f, of the steps a millisecond (1 / ms), and of f / ms: from
    /// them the stretch is told.
    pub shares: f64,
    pub share_squares: f64,
    pub rates: f64,
    pub products: f64,
}

impl Steps {
    /// One step that took `ms`, of which `overlap_ms` while others ran.
    pub fn one(ms: f64, overlap_ms: f64) -> Self {
        let ms = ms.max(SHORTEST);
        let overlap = overlap_ms.clamp(0.0, ms);
        let (alone, share, rate) = (ms - overlap, overlap / ms, 1.0 / ms);
        let (share_squares, products) = (share * share, share * rate);
        Self { steps: 1.0, overlap, alone, shares: share, share_squares, rates: rate, products }
    }

    pub fn add(&mut self, other: &Self, weight: f64) {
        self.steps += weight * other.steps;
        self.overlap += weight * other.overlap;
        self.alone += weight * other.alone;
        self.shares += weight * other.shares;
        self.share_squares += weight * other.share_squares;
        self.rates += weight * other.rates;
        self.products += weight * other.products;
    }
}

/// What one model has done.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// By model: requests that went on there after a step.
    pub routed: Vec<f64>,
    /// Requests that ended after a step, and new ones that began here.
    pub ended: f64,
    pub begun: f64,
    /// Tokens that the steps wrote.
    pub tokens: f64,
    /// By batch size from 1.
    pub sizes: Vec<Steps>,
}

impl Seen {
    /// Nothing, in a system of so many models.
    pub fn none(models: usize) -> Self {
        Self { routed: vec![0.0; models], ..Self::default() }
    }

    /// A step took `ms`, of which `overlap_ms` while other models ran, and wrote `tokens` in all. `routed`: by
    /// model, how many of its requests go on there, together the batch.
    pub fn step(&mut self, ms: f64, overlap_ms: f64, routed: &[u32], tokens: f64) {
        let batch: u32 = routed.iter().sum();
        let Some(index) = (batch as usize).checked_sub(1) else { return };
        self.routed.iter_mut().zip(routed).for_each(|(sum, count)| *sum += f64::from(*count));
        self.tokens += tokens;
        self.sizes.resize(self.sizes.len().max(index + 1), Steps::default());
        self.sizes[index].add(&Steps::one(ms, overlap_ms), 1.0);
    }

    pub fn add(&mut self, other: &Self, weight: f64) {
        self.routed.iter_mut().zip(&other.routed).for_each(|(sum, more)| *sum += weight * more);
        self.tokens += weight * other.tokens;
        self.ended += weight * other.ended;
        self.begun += weight * other.begun;
        self.sizes.resize(self.sizes.len().max(other.sizes.len()), Steps::default());
        self.sizes.iter_mut().zip(&other.sizes).for_each(|(sum, more)| sum.add(more, weight));
    }

    /// Requests of all steps together, and how many steps they were.
    pub fn requests(&self) -> f64 {
        self.routed.iter().sum::<f64>() + self.ended
    }

    pub fn steps(&self) -> f64 {
        self.sizes.iter().map(|sums| sums.steps).sum()
    }
}
