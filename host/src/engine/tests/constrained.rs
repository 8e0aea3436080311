//! Answers of a form under policies that hand over, draft, verify, roll back and replace as chance has it.

use proptest::prelude::*;
use tokenrouter_plugin_api::random::uniform;
use tokenrouter_plugin_api::{
    Acceptance, Context, Decision, Handoff, NO_TOKEN, PeerView, Policy, PolicyError, RequestView, RouteBatch,
};

use super::*;
use crate::constraint::{Constraint, Form, Grammar, Vocabulary, compile};
use crate::policy::Linked;
use crate::policy::monitor::DEFAULT_BUDGET;
use crate::policy::overrides::Overrides;
use crate::request::Ledger;

const VOCABULARY: u32 = 50;
const EOS: [TokenId; 2] = [0, 49];
/// Tokens from 1 on; there is none for 47, 48 and 49.
const TEXTS: [&str; 46] = [
    "a", "b", "c", "d", "e", "ab", "cd", "abc", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "12", "345", "{",
    "}", "[", "]", "\"", "\":", ",", ":", " ", "\n", "\\", "null", "true", "false", "n", "u", "l", "t", "r", "-", ".",
    "{\"", "\"}", "],", "\u{e9}", "(",
];

fn text(token: TokenId) -> &'static [u8] {
    (token as usize).checked_sub(1).and_then(|index| TEXTS.get(index)).map_or(&[], |text| text.as_bytes())
}

fn grammar(form: Form) -> Arc<Grammar> {
    let vocabulary = Vocabulary::new(VOCABULARY as usize, text).unwrap();
    Arc::new(compile(form, &vocabulary).unwrap())
}

fn forms() -> [Form; 5] {
    let schema = r#"{"type":"object","properties":{"ab":{"type":"integer","minimum":-5,"maximum":400},
        "c":{"type":"array","items":{"type":"string","maxLength":4},"maxItems":3},"d":{"enum":[null,true,"e"]}},
        "required":["ab","d"],"additionalProperties":false}"#;
    [
        Form::JsonSchema(schema.into()),
        Form::Regex("(ab|cd|[0-9]{2,3}){3,40}e".into()),
        Form::Regex("(a|b|c)*".into()),
        Form::Choice(vec!["null".into(), "true".into(), "ab12".into()]),
        Form::Lark("start: \"[\" start \"]\" | \"12\" | \"(\" start".into()),
    ]
}

/// Does whatever a policy can do, by chance.
struct Chaos {
    own: u32,
    models: u32,
}

impl Chaos {
    fn draw(&self, seed: u64, position: u64, what: u64, below: u32) -> u32 {
        (uniform(seed, position, 1 << 20 | what << 8 | u64::from(self.own)) * f64::from(below)) as u32
    }
}

impl Policy for Chaos {
    const NAME: &'static str = "chaos";
    fn create(context: &Context<'_>, _: &str) -> Result<Self, PolicyError> {
        Ok(Self { own: context.model, models: context.models.len() as u32 })
    }
    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        for (row, out) in out.iter_mut().enumerate() {
            let (seed, position) = (batch.seeds[row], u64::from(batch.positions[row]));
            *out = match self.draw(seed, position, 1, 8) {
                0 | 1 => Decision::STAY,
                2..=4 if batch.drafts[row] != NO_TOKEN => Decision::ACCEPT,
                2 | 3 => Decision::DRAFT,
                4 | 5 => Decision::to(self.draw(seed, position, 2, self.models)),
                6 => Decision::STAY.replacing(self.draw(seed, position, 3, VOCABULARY + 5)),
                _ => Decision::DRAFT.replacing(self.draw(seed, position, 3, VOCABULARY + 5)),
            };
        }
    }
    fn send(&mut self, request: &RequestView<'_>, _: u32) -> Handoff {
        let (seed, position) = (request.seed, request.tokens.len() as u64);
        let mut handoff = Handoff::default();
        handoff.keep_candidate = self.draw(seed, position, 4, 3) > 0;
        handoff.verify = self.draw(seed, position, 5, 2) > 0;
        handoff.rollback = self.draw(seed, position, 6, 4).saturating_sub(1);
        handoff.budget = Some(self.draw(seed, position, 7, 6)).filter(|budget| *budget > 0);
        handoff
    }
    fn receive(&mut self, request: &RequestView<'_>, message: &PeerView<'_>) -> Acceptance {
        match self.draw(request.seed, request.tokens.len() as u64, 8, 3) {
            0 => Acceptance::Accept(message.provisional / 2),
            1 => Acceptance::Accept(message.provisional),
            _ => Acceptance::Verify,
        }
    }
}

/// Three models with room for few requests, and a route over them.
fn engine(pages: u32, min_batch: u32) -> Engine {
    let models = (0..3).map(|i| ModelSetup {
        masked: vec![],
        runner: Box::new(SimulatedRunner::new(&format!("m{i}"), i, VOCABULARY, pages).ending_with(EOS.to_vec())),
        text: Arc::new(NoText),
        min_batch: vec![min_batch],
        max_wait: Duration::from_millis(1),
        hold: Duration::ZERO,
        max_rows: 64,
        prefill_chunk: 64,
        prefix_cache: true,
    });
    let route = RouteSetup {
        name: "chaos".into(),
        models: (0..3).map(|i| (ModelId(i), format!("m{i}"))).collect(),
        entry: 0,
        policy: Arc::new(Linked::<Chaos>::default()),
        settings: "{}".into(),
        overrides: Overrides::default(),
        on_error: OnError::FailRequest,
        budget: DEFAULT_BUDGET,
        excluded: vec![6],
        directory: ".".into(),
    };
    Engine::start(models.collect(), vec![route]).unwrap()
}

fn constrained(engine: &Engine, grammar: &Arc<Grammar>, seed: u64, sampling: SamplingParams) -> NewRequest {
    let constraint = Some(Constraint::new(Arc::clone(grammar)));
    let route = engine.find_route("chaos").unwrap();
    let sampling = SamplingParams { seed, constraint, ..sampling };
    NewRequest { route, prompt: vec![1, 2, 3], max_tokens: 150, sampling, return_signals: false, cache_salt: None }
}

/// Tokens of an answer, how it ended, and between which models it went.
fn answer(mut stream: RequestStream) -> (Vec<TokenId>, FinishReason, usize) {
    let mut ledger = Ledger::default();
    loop {
        match stream.events.blocking_recv().expect("an end").event {
            Event::Committed { start, tokens } => drop(ledger.enter(start, tokens).unwrap()),
            Event::Finished { reason, .. } => {
                let changes = ledger.tokens().windows(2).filter(|pair| pair[0].model != pair[1].model).count();
                return (ledger.tokens().iter().map(|c| c.token).collect(), reason, changes);
            }
            Event::PromptCached { .. } | Event::PromptScored { .. } => {}
            Event::Failed(error) => panic!("{error}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn every_answer_has_its_form(seed in any::<u64>(), pages in 12..60u32, min_batch in 1..3u32) {
        let engine = engine(pages, min_batch);
        let grammars = forms().map(grammar);
        let held = SamplingParams { min_tokens: 30, ignore_eos: true, stop_token_ids: vec![3], ..SamplingParams::greedy() };
        let asked: Vec<_> = (0..20u64)
            .map(|i| {
                let grammar = &grammars[i as usize % grammars.len()];
                let sampling = if i % 4 == 3 { held.clone() } else { SamplingParams::greedy() };
                (grammar, engine.submit(constrained(&engine, grammar, seed.wrapping_add(i), sampling)).unwrap())
            })
            .collect();
        for (grammar, stream) in asked {
            let (mut tokens, reason, _) = answer(stream);
            let mut matcher = grammar.matcher();
            match reason {
                FinishReason::Stop(last) => {
                    prop_assert_eq!(tokens.last(), Some(&last));
                    // A stop token cuts the text where it stands; an end token comes where it may end.
                    if EOS.contains(&last) {
                        tokens.pop();
                    }
                    matcher.follow(&tokens).unwrap();
                    prop_assert!(!EOS.contains(&last) || matcher.is_accepting().unwrap());
                }
                FinishReason::Complete => {
                    matcher.follow(&tokens).unwrap();
                    prop_assert!(matcher.is_complete());
                }
                FinishReason::Length => matcher.follow(&tokens).unwrap(),
            }
            prop_assert!(!tokens.contains(&6), "token 6 is masked");
        }
    }
}

#[test]
fn drafts_and_hand_offs_happen_in_them() {
    let engine = engine(60, 1);
    let grammar = grammar(forms()[1].clone());
    let streams: Vec<_> = (0..20)
        .map(|seed| engine.submit(constrained(&engine, &grammar, seed, SamplingParams::greedy())).unwrap())
        .collect();
    let changes: usize = streams.into_iter().map(|stream| answer(stream).2).sum();
    assert!(changes > 50, "{changes} changes of model");
    assert!(engine.snapshot(ModelId(0)).counters.invalid_decisions > 0, "no replacement was refused");
}

#[test]
fn what_holds_an_end_back_gives_way_where_nothing_else_may_follow() {
    let engine = engine(60, 1);
    let choice = grammar(Form::Choice(vec!["null".into(), "true".into()]));
    let held = SamplingParams { min_tokens: 100, ignore_eos: true, ..SamplingParams::greedy() };
    let (tokens, reason, _) = answer(engine.submit(constrained(&engine, &choice, 7, held.clone())).unwrap());
    let text: Vec<u8> = tokens.iter().flat_map(|&token| text(token)).copied().collect();
    assert!([&b"null"[..], b"true"].contains(&&text[..]) && reason == FinishReason::Complete, "{text:?} {reason:?}");
    // With something else to write, it goes on.
    let letters = grammar(Form::Regex("(a|b|c)*".into()));
    let (tokens, reason, _) = answer(engine.submit(constrained(&engine, &letters, 7, held)).unwrap());
    assert_eq!((tokens.len(), reason), (150, FinishReason::Length));
}
