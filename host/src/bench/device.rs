//! A model with random weights on a device, and made-up sequences for it.

use crate::request::{ModelId, SamplingParams, TokenId};
use crate::runner::cuda::{self, CudaRunner, Dtype, LoadOptions, Source};
use crate::runner::model_config::ModelConfig;
use crate::runner::{PAGE_TOKENS, PageId, RowBatch, Rows, SignalRequest};
use tokenrouter_plugin_api::{SignalSet, random};

/// Replays of a graph, of which the median counts.
pub const REPLAYS: usize = 30;
/// Rows that a model's work memory has room for, and most rows of a prompt's step.
pub const MAX_ROWS: u32 = 2048;
/// Of weights, K/V and tokens.
const SEED: u64 = 1;

/// Sequences of one length, each with as many rows behind its context. The last row of each is sampled
/// greedily.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sequences {
    pub(super) count: u32,
    /// Tokens of each whose K/V is there.
    pub(super) context: u32,
    /// Rows of each.
    pub(super) rows: u32,
}

impl Sequences {
    fn pages_each(self) -> u32 {
        (self.context + self.rows).div_ceil(PAGE_TOKENS as u32)
    }

    /// K/V pages of all.
    pub(super) fn pages(self) -> u32 {
        self.count * self.pages_each()
    }

    /// Bytes of keys and values that a step reads if it reads each once, those of its own rows included.
    pub(super) fn kv_bytes(self, config: &ModelConfig, dtype: Dtype) -> u64 {
        let tokens = u64::from(self.count) * u64::from(self.context + self.rows);
        tokens * cuda::page_bytes(config, dtype) / PAGE_TOKENS as u64
    }

    /// Positions that the rows see, over all rows.
    pub(super) fn positions(self) -> u64 {
        let (context, rows) = (u64::from(self.context), u64::from(self.rows));
        u64::from(self.count) * (rows * context + rows * (rows + 1) / 2)
    }

    pub(super) fn make(self, vocab_size: u32) -> Made {
        let token = |sequence: u32, position: u32| {
            (random::uniform(SEED, position.into(), sequence.into()) * f64::from(vocab_size)) as TokenId
        };
        let context = |sequence| (0..self.context + self.rows).map(|position| token(sequence, position)).collect();
        let pages = |sequence| (sequence * self.pages_each()..(sequence + 1) * self.pages_each()).collect();
        Made {
            of: self,
            contexts: (0..self.count).map(context).collect(),
            pages: (0..self.count).map(pages).collect(),
            sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        }
    }
}

/// The tokens and pages of [`Sequences`].
pub(super) struct Made {
    of: Sequences,
    contexts: Vec<Vec<TokenId>>,
    pages: Vec<Vec<PageId>>,
    sampling: SamplingParams,
}

impl Made {
    pub(super) fn batch(&self) -> RowBatch<'_> {
        let start = self.of.context as usize;
        let rows = |(context, pages)| {
            let context: &Vec<TokenId> = context;
            Rows {
                context,
                start,
                end: context.len(),
                pages,
                sampled: 1,
                scored: 0,
                sampling: &self.sampling,
                prompt_len: context.len(),
                masked: &[],
                nets: &[],
                allowed: &[],
            }
        };
        let scalars = SignalSet::ENTROPY
            .union(SignalSet::TOP1_PROB)
            .union(SignalSet::MARGIN)
            .union(SignalSet::LOGSUMEXP)
            .union(SignalSet::CANDIDATE_PROB);
        RowBatch {
            sequences: self.contexts.iter().zip(self.pages.iter().map(Vec::as_slice)).map(rows).collect(),
            signals: SignalRequest { scalars, ..SignalRequest::default() },
            hidden: false,
        }
    }
}

/// A model with room for each of `sequences`, and K/V that is not zero. `name` is for messages, which are
/// one sentence.
pub(super) fn load(
    name: &str,
    config: &ModelConfig,
    (ordinal, dtype): (u32, Dtype),
    sequences: &[Sequences],
) -> Result<CudaRunner, String> {
    let pages = sequences.iter().map(|of| of.pages()).max().unwrap_or(1);
    for of in sequences {
        let tokens = of.context + of.rows;
        if tokens as usize > config.context {
            return Err(format!(
                "{name}: sequences of {tokens} tokens, but its context has {}; lower --context-len or --prefill",
                config.context
            ));
        }
    }
    let kv = u64::from(pages) * cuda::page_bytes(config, dtype);
    let weights = cuda::weight_bytes(config, dtype);
    let wanted = weights + kv + cuda::workspace_bytes(config, dtype, MAX_ROWS);
    let free = cuda::device(ordinal)?.free;
    if wanted > free {
        return Err(format!(
            "{name}: {:.1} GB of weights, {:.1} GB of K/V and work memory come to {:.1} GB, but cuda:{ordinal} has {:.1} GB \
             free; lower --rows, --context-len or --prefill",
            gb(weights),
            gb(kv),
            gb(wanted),
            gb(free)
        ));
    }
    let options = LoadOptions {
        name: name.into(),
        model: ModelId(0),
        ordinal,
        dtype,
        pages,
        max_rows: MAX_ROWS,
        partition: None,
        graphs: true,
        high_priority: false,
        progress: None,
    };
    let runner = CudaRunner::new(config.clone(), Source::Random { seed: SEED }, options).map_err(|e| e.to_string())?;
    runner.fill_kv(SEED)?;
    Ok(runner)
}

fn gb(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::model_config::shapes;

    #[test]
    fn what_sequences_read() {
        let config = shapes::find("qwen3-0.6b").unwrap().config(None).unwrap();
        let of = Sequences { count: 2, context: 1024, rows: 4 };
        assert_eq!(of.pages(), 2 * 65);
        // 28 layers, 8 heads of 128 for keys and for values.
        assert_eq!(of.kv_bytes(&config, Dtype::Bf16), 2 * 1028 * 28 * 2 * 8 * 128 * 2);
        assert_eq!(of.kv_bytes(&config, Dtype::F32), 2 * of.kv_bytes(&config, Dtype::Bf16));
        assert_eq!(of.positions(), 2 * (1025 + 1026 + 1027 + 1028));
    }

    #[test]
    fn batches_are_what_was_asked_for() {
        let of = Sequences { count: 3, context: 20, rows: 2 };
        let made = of.make(100);
        let batch = made.batch();
        assert_eq!((batch.rows(), batch.sampled()), (6, 3));
        let [first, second, third] = batch.sequences.as_slice() else { panic!() };
        assert_eq!((first.start, first.end, first.pages), (20, 22, &[0, 1][..]));
        assert_eq!((second.pages, third.pages), (&[2, 3][..], &[4, 5][..]), "no two share a page");
        assert!(first.context.iter().all(|token| *token < 100) && first.context != second.context);
        assert!(batch.signals.scalars.contains(SignalSet::ENTROPY) && batch.signals.top_k == 0);
    }
}
