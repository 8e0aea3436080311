//! Predicted time per token.

use crate::simulation::{Observer, Simulation};
use crate::system::{Fault, Setting, System};

/// Tokens of a request over which the time per token is taken.
const CHUNK: u32 = 64;
/// Chunks that are simulated, and those without which a 99th percentile is not known.
const CHUNKS: usize = 1500;
const FEWEST: usize = 100;
/// Moments at which steps end that are simulated at most.
const MOMENTS: usize = 1_000_000;

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

/// 99th percentile of the milliseconds a token over chunks of 64 tokens of a request, simulated. `None`: not known, as
/// too few tokens are written.
pub(super) fn p99_tpot_ms(system: &System, requests: usize, setting: &Setting) -> Result<Option<f64>, Fault> {
    let mut simulation = Simulation::new(system.clone(), requests, setting.clone(), 1)?;
    let mut chunks = Chunks::default();
    for _ in 0..MOMENTS {
        // A setting that has been checked cannot lock up.
        if chunks.ms.len() >= CHUNKS || simulation.advance(&mut chunks).is_err() {
            break;
        }
    }
    Ok(if chunks.ms.len() < FEWEST { None } else { super::percentile_99(&mut chunks.ms) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::system::Model;

    #[test]
    fn what_takes_too_long_is_not_known() {
        let p99 = |tokens: f64| {
            let (models, commits) = (vec![Model::new("m", vec![2.0])], vec![vec![tokens]]);
            let system = System { models, routing: vec![vec![1.0]], commits, sigma: Vec::new(), entry: 0 };
            p99_tpot_ms(&system.checked().unwrap(), 4, &Setting::new(vec![1])).unwrap()
        };
        assert_eq!((p99(0.5), p99(1e-9)), (Some(4.0), None));
    }
}
