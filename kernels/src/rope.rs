//! Rotary position embedding, with the two halves of a head as the pairs.

/// Cosines and sines of the positions of a batch, `[row][head_dim / 2]`.
#[derive(Clone, Debug, Default)]
pub struct RopeTable {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// Fill the table for `positions`.
    pub fn fill(&mut self, frequencies: &[f32], positions: impl Iterator<Item = usize>) {
        self.cos.clear();
        self.sin.clear();
        for position in positions {
            for &frequency in frequencies {
                let (sin, cos) = (position as f32 * frequency).sin_cos();
                self.cos.push(cos);
                self.sin.push(sin);
            }
        }
    }

    /// Rotate the heads of one row (all side by side in `x`).
    pub fn apply(&self, row: usize, head_dim: usize, x: &mut [f32]) {
        let half = head_dim / 2;
        let (cos, sin) = (&self.cos[row * half..][..half], &self.sin[row * half..][..half]);
        for head in x.chunks_exact_mut(head_dim) {
            rotate_half(head, cos, sin);
        }
    }
}

/// Rotate one head.
pub fn rotate_half(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(cos.len());
    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}
