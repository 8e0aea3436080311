//! A simulated runner that knows what the K/V in each page was computed from, and refuses a forward that
//! reads that of another sequence or writes where another sequence reads.

use tokenrouter::request::TokenId;
use tokenrouter::runner::simulated::SimulatedRunner;
use tokenrouter::runner::{ModelInfo, PAGE_TOKENS, RowBatch, RowOutputs, Rows, Runner, RunnerError};

pub struct Shadow {
    inner: SimulatedRunner,
    /// For each position of each page: hash of the tokens up to it. K/V depends on all of them.
    cells: Vec<Option<u64>>,
}

impl Shadow {
    pub fn new(inner: SimulatedRunner) -> Self {
        let cells = vec![None; inner.info().pages as usize * PAGE_TOKENS];
        Self { inner, cells }
    }
}

/// For each position before `end`, the hash of all tokens up to it.
fn hashes(context: &[TokenId], end: usize) -> impl Iterator<Item = u64> {
    context[..end].iter().scan(0u64, |hash, &token| {
        *hash = (*hash ^ u64::from(token) ^ *hash >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
        Some(*hash)
    })
}

fn cell(rows: &Rows<'_>, position: usize) -> usize {
    rows.pages[position / PAGE_TOKENS] as usize * PAGE_TOKENS + position % PAGE_TOKENS
}

impl Runner for Shadow {
    fn info(&self) -> &ModelInfo {
        self.inner.info()
    }

    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        for (i, rows) in batch.sequences.iter().enumerate() {
            for (position, hash) in hashes(rows.context, rows.start).enumerate() {
                if self.cells[cell(rows, position)] != Some(hash) {
                    return Err(RunnerError::new(format!("position {position} has the K/V of another sequence")));
                }
            }
            let written = &rows.pages[rows.start / PAGE_TOKENS..=(rows.end - 1) / PAGE_TOKENS];
            for (j, other) in batch.sequences.iter().enumerate() {
                if i != j && written.iter().any(|page| other.pages.contains(page)) {
                    return Err(RunnerError::new("rows are written to a page that another sequence has"));
                }
            }
        }
        for rows in &batch.sequences {
            for (position, hash) in hashes(rows.context, rows.end).enumerate().skip(rows.start) {
                self.cells[cell(rows, position)] = Some(hash);
            }
        }
        self.inner.forward(batch)
    }
}
