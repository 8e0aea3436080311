//! Predicted time per token.

use crate::simulation::{Observer, Simulation};
use crate::system::{Fault, Setting, System};

/// Tokens of a request over which the time per token is taken.
const CHUNK: u32 = 64;
/// Chunks that are simulated.
const CHUNKS: usize = 1500;

/// Chunks of each request.
#[derive(Default)]
struct Chunks {
    /// By request: tokens since the chunk began, and when it began.
    open: Vec<(f64, f64)>,
    ms: Vec<f64>,
}

impl Observer for Chunks {
    fn routed(&mut self, now: f64, request: u32, _: usize, _: usize, tokens: f64) {
        let index = request as usize;
        self.open.resize(self.open.len().max(index + 1), (0.0, now));
        let (written, began) = &mut self.open[index];
        *written += tokens;
        if *written >= f64::from(CHUNK) {
            self.ms.push((now - *began) / *written);
            (*written, *began) = (0.0, now);
        }
    }
}

/// 99th percentile of the milliseconds a token over chunks of 64 tokens of a request, simulated.
pub(super) fn p99_tpot_ms(system: &System, requests: usize, setting: &Setting) -> Result<f64, Fault> {
    let mut simulation = Simulation::new(system.clone(), requests, setting.clone(), 1)?;
    let mut chunks = Chunks::default();
    // A setting that has been checked cannot lock up.
    while chunks.ms.len() < CHUNKS && simulation.advance(&mut chunks).is_ok() {}
    Ok(super::percentile_99(&mut chunks.ms).unwrap_or(f64::INFINITY))
}
