//! The bound on disk use. Pure.

/// Bytes that a recording may hold and holds.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    max: u64,
    /// All files but the manifest of this run.
    used: u64,
}

impl Budget {
    pub fn new(max: u64, used: u64) -> Self {
        Self { max, used }
    }

    /// Whether files of `more` bytes fit beside a manifest of `manifest` bytes, which is on disk twice while
    /// it is rewritten.
    pub fn fits(&self, more: u64, manifest: u64) -> bool {
        let total = self.used.checked_add(more).and_then(|sum| sum.checked_add(manifest.checked_mul(2)?));
        total.is_some_and(|total| total <= self.max)
    }

    /// A file of `bytes` was written.
    pub fn spend(&mut self, bytes: u64) {
        self.used = self.used.saturating_add(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn to_the_byte() {
        let mut budget = Budget::new(100, 10);
        assert!(budget.fits(70, 10) && !budget.fits(71, 10) && !budget.fits(70, 11));
        budget.spend(70);
        assert!(budget.fits(0, 10) && !budget.fits(1, 10));
        assert!(!budget.fits(u64::MAX, 1) && !budget.fits(1, u64::MAX));
        assert!(!Budget::new(5, 6).fits(0, 0));
    }
}
