//! The CPU runner: f32, the reference for every other runner.
