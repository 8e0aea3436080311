//! What the host costs a step: scheduler, policy and protocol on a runner that computes nothing.
//!
//! Design limits: 20 µs a step of 16 requests over two models, 10 µs a hand-off in process.

#![allow(clippy::expect_used)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use tokenrouter::engine::OnError;
use tokenrouter::policy::{Linked, PolicyFactory};
use tokenrouter::request::{ModelId, NewRequest, RequestSpec, RouteId, SamplingParams};
use tokenrouter::runner::{Columns, ModelInfo, RowBatch, RowOutputs, Runner, RunnerError, Sample};
use tokenrouter::subserver::{Attachment, Effect, Limits, Message, SubServer};
use tokenrouter_plugin_api::{
    Context, Decision, Handoff, ModelDescription, ModelIndex, NoServices, Policy, PolicyError, RequestView,
    Requirements, RouteBatch, SignalSet,
};

const REQUESTS: u64 = 16;

/// Answers at once; entropy 1 on every third row, so that the policy below hands off.
struct Idle {
    info: ModelInfo,
    calls: u32,
}

impl Runner for Idle {
    fn info(&self) -> &ModelInfo {
        &self.info
    }
    fn forward(&mut self, batch: &RowBatch<'_>) -> Result<RowOutputs, RunnerError> {
        self.calls = self.calls.wrapping_add(1);
        let rows = batch.sampled();
        let sample = |i: usize| Sample { token: 5 + i as u32, logprob: -0.5, top_logprobs: Vec::new(), finite: true };
        let entropy = |i: usize| if (i as u32 + self.calls).is_multiple_of(3) { 1.0 } else { 0.0 };
        let signals = Columns { entropy_norm: (0..rows).map(entropy).collect(), ..Columns::default() };
        Ok(RowOutputs { samples: (0..rows).map(sample).collect(), signals, ..RowOutputs::default() })
    }
}

/// R-Stitch's rule.
struct Threshold {
    own: ModelIndex,
}

impl Policy for Threshold {
    const NAME: &'static str = "threshold";
    fn create(ctx: &Context<'_>, _: &str) -> Result<Self, PolicyError> {
        Ok(Self { own: ctx.model })
    }
    fn requirements(&self) -> Requirements {
        Requirements::signals(SignalSet::ENTROPY_NORM)
    }
    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        for (out, &entropy) in out.iter_mut().zip(batch.signals.entropy_norm) {
            if (self.own == 0) == (entropy > 0.03) {
                *out = Decision::to(1 - self.own);
            }
        }
    }
    fn send(&mut self, _: &RequestView<'_>, to: ModelIndex) -> Handoff {
        if to == 1 { Handoff::drop_candidate() } else { Handoff::default() }
    }
}

fn server(own: u32) -> SubServer {
    let models = [0, 1].map(|i| ModelDescription { name: format!("m{i}"), role: String::new() });
    let context = Context {
        route: "r",
        model: own,
        models: &models,
        entry: 0,
        vocab_size: 1000,
        eos: &[0],
        services: &NoServices,
    };
    let policy = Linked::<Threshold>::default().create(&context, "{}").expect("the policy takes no settings");
    let ids = vec![ModelId(0), ModelId(1)];
    let attachment = Attachment::new("r", Some(policy), ids, own, OnError::StayLocal, &[]);
    let info = ModelInfo {
        name: format!("m{own}"),
        description: String::new(),
        vocab_size: 1000,
        hidden_size: 1,
        context: 1 << 20,
        eos: vec![0],
        pages: 1 << 16,
        weight_bytes: 0,
        page_bytes: 0,
    };
    let limits = Limits { max_rows: 512, prefill_chunk: 256 };
    SubServer::new(ModelId(own), Box::new(Idle { info, calls: 0 }), vec![Some(attachment)], limits)
}

fn spec(id: u64) -> Message {
    let sampling = SamplingParams::greedy();
    let new = NewRequest {
        route: RouteId(0),
        prompt: vec![7; 100],
        max_tokens: 1 << 19,
        sampling,
        return_signals: false,
        cache_salt: None,
    };
    Message::Submit(Arc::new(RequestSpec::new(id, new)))
}

/// Two sub-servers and the messages between them, in one thread.
struct Pair([SubServer; 2]);

impl Pair {
    fn new() -> Self {
        let mut pair = Self([server(0), server(1)]);
        for id in 0..REQUESTS {
            pair.0[0].take(spec(id));
        }
        // Past the prompts.
        for _ in 0..64 {
            pair.round();
        }
        pair
    }

    /// A step of each model with its messages; returns how many steps ran.
    fn round(&mut self) -> u64 {
        let mut steps = 0;
        for own in 0..2 {
            steps += u64::from(self.0[own].step().rows > 0);
            let effects: Vec<Effect> = self.0[own].effects().collect();
            for effect in effects {
                if let Effect::Send(message) = effect {
                    self.0[1 - own].take(Message::Peer(message));
                } else {
                    black_box(effect);
                }
            }
        }
        steps
    }
}

fn step(c: &mut Criterion) {
    c.bench_function("step of 16 requests over 2 models: scheduler + policy + protocol", |b| {
        b.iter_custom(|wanted| {
            let mut pair = Pair::new();
            let (mut steps, start) = (0, Instant::now());
            while steps < wanted {
                steps += pair.round();
            }
            start.elapsed().mul_f64(wanted as f64 / steps as f64)
        });
    });
}

/// From the sender's channel to the request being owned and ready at the receiver, across threads.
fn handoff(c: &mut Criterion) {
    c.bench_function("hand-off in process, send to admitted", |b| {
        b.iter_custom(|wanted| {
            let mut sender = server(0);
            let (to_peer, inbox) = crossbeam_channel::unbounded::<Message>();
            let (admitted, seen) = crossbeam_channel::unbounded::<Instant>();
            let peer = std::thread::spawn(move || {
                let mut peer = server(1);
                for message in inbox {
                    let id = if let Message::Peer(p) = &message { p.id } else { 0 };
                    peer.take(message);
                    let now = Instant::now();
                    assert!(peer.owns(id));
                    peer.take(Message::Cancel(id));
                    if admitted.send(now).is_err() {
                        return;
                    }
                }
            });
            let mut total = Duration::ZERO;
            let mut done = 0;
            let mut id = 0;
            while done < wanted {
                id += 1;
                sender.take(spec(id));
                while sender.owns(id) {
                    sender.step();
                }
                let messages: Vec<Effect> = sender.effects().collect();
                for effect in messages {
                    if let Effect::Send(message) = effect {
                        let start = Instant::now();
                        to_peer.send(Message::Peer(message)).expect("the peer is alive");
                        total += seen.recv().expect("the peer answers") - start;
                        done += 1;
                    }
                }
                sender.take(Message::Cancel(id));
            }
            drop(to_peer);
            peer.join().expect("the peer ends well");
            total
        });
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_millis(500));
    targets = step, handoff
}
criterion_main!(benches);
