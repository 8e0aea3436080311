//! Batches that make no sense are refused before anything is computed.

use tokenrouter::request::SamplingParams;
use tokenrouter::runner::{RowBatch, Rows, Runner, SignalRequest};

use crate::support::{load, tiny};

#[test]
fn inconsistent_batches() {
    let mut runner = load(&tiny::dir("qwen3"), 4);
    let (sampling, context, long) = (SamplingParams::greedy(), [5u32; 40], [5u32; 600]);
    let good = Rows {
        context: &context,
        start: 0,
        end: 40,
        pages: &[2, 0, 3],
        sampled: 1,
        scored: 0,
        sampling: &sampling,
        prompt_len: 40,
        masked: &[],
        nets: &[],
        allowed: &[],
    };
    let cases = [
        (Rows { start: 40, ..good }, "rows 40..40"),
        (Rows { end: 41, ..good }, "rows 0..41 of 40 tokens"),
        (Rows { sampled: 41, ..good }, "41 sampled of 40 rows"),
        (Rows { scored: 40, ..good }, "40 scored and 1 sampled of 40 rows"),
        (Rows { scored: 1, sampled: 0, ..good }, "position 39 is scored, but no token follows it"),
        (Rows { prompt_len: 41, ..good }, "prompt of 41"),
        (Rows { pages: &[2, 0], ..good }, "2 pages, but 40 positions need 3"),
        (Rows { pages: &[2, 0, 4], ..good }, "page 4 of a pool of 4"),
        (Rows { context: &[256; 40], ..good }, "token 256 of a vocabulary of 256"),
        (Rows { allowed: &[7; 9], ..good }, "masks of 9 words, but 1 sampled rows need 8"),
        (Rows { context: &long, start: 599, end: 600, ..good }, "position 599 of a context of 512"),
    ];
    for (rows, message) in cases {
        let error =
            runner.forward(&RowBatch { sequences: vec![good, rows], ..RowBatch::default() }).unwrap_err().message;
        assert!(error.contains(message) && error.contains("`test`") && error.contains("sequence 1"), "{error}");
    }
    let signals = SignalRequest { token_logits: vec![256], ..SignalRequest::default() };
    let error = runner.forward(&RowBatch { sequences: vec![good], signals, hidden: false }).unwrap_err().message;
    assert!(error.contains("token 256"), "{error}");
    assert!(runner.forward(&RowBatch { sequences: vec![good], ..RowBatch::default() }).is_ok());
    let none = runner.forward(&RowBatch::default()).unwrap();
    assert!(none.samples.is_empty());
}
