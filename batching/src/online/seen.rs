//! What models have done: sums that only grow, so that an interval is the difference of two readings.

/// Steps of one batch size. Overlap: milliseconds of a step in which other models ran; alone: the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Steps {
    pub steps: f64,
    pub overlap: f64,
    pub alone: f64,
    /// Of overlap * overlap and of overlap * alone: from them the stretch is told.
    pub overlap_squares: f64,
    pub products: f64,
}

impl Steps {
    /// One step that took `ms`, of which `overlap_ms` while others ran.
    pub fn one(ms: f64, overlap_ms: f64) -> Self {
        let overlap = overlap_ms.clamp(0.0, ms);
        let alone = ms - overlap;
        Self { steps: 1.0, overlap, alone, overlap_squares: overlap * overlap, products: overlap * alone }
    }

    pub fn add(&mut self, other: &Self, weight: f64) {
        self.steps += weight * other.steps;
        self.overlap += weight * other.overlap;
        self.alone += weight * other.alone;
        self.overlap_squares += weight * other.overlap_squares;
        self.products += weight * other.products;
    }
}

/// What one model has done.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// By model: requests that went on there after a step. One that ended counts where another begins.
    pub routed: Vec<f64>,
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
        self.sizes.resize(self.sizes.len().max(other.sizes.len()), Steps::default());
        self.sizes.iter_mut().zip(&other.sizes).for_each(|(sum, more)| sum.add(more, weight));
    }

    pub fn requests(&self) -> f64 {
        self.routed.iter().sum()
    }
}
