use proptest::prelude::*;

use super::*;

const MODEL: ModelId = ModelId(3);
const EOS: TokenId = 2;

/// Logits in [-4, 4), different for each `stream`.
fn noise(stream: u64, n: usize) -> Vec<f32> {
    (0..n as u64).map(|i| random::uniform(stream, i, 1 << 20) as f32 * 8.0 - 4.0).collect()
}

struct Case {
    logits: Vec<f32>,
    context: Vec<TokenId>,
    prompt_len: usize,
    params: SamplingParams,
    masked: Vec<TokenId>,
    allowed: Vec<u32>,
    wanted: SignalRequest,
}

impl Case {
    fn new(logits: Vec<f32>, params: SamplingParams) -> Self {
        Self {
            logits,
            context: vec![0, 1],
            prompt_len: 1,
            params,
            masked: Vec::new(),
            allowed: Vec::new(),
            wanted: SignalRequest { scalars: SignalSet::ALL, ..SignalRequest::default() },
        }
    }

    fn run_on(&self, model: ModelId) -> (Sample, Columns) {
        let mut columns = Columns::default();
        let row = Row {
            context: &self.context,
            prompt_len: self.prompt_len,
            params: &self.params,
            masked: &self.masked,
            allowed: &self.allowed,
        };
        let mut sampler = Sampler::new(model, vec![EOS]);
        let sample = sampler.sample(&mut self.logits.clone(), &row, &self.wanted, &mut columns);
        (sample, columns)
    }

    fn run(&self) -> (Sample, Columns) {
        self.run_on(MODEL)
    }

    fn token(&self) -> TokenId {
        let (sample, _) = self.run();
        assert!(sample.finite);
        sample.token
    }
}

/// What `draw` should sample from: temperature, then min-p, top-k and top-p, by sorting everything.
fn distribution(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |l: f32| (f64::from(l - max) / f64::from(params.temperature)).exp();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    order.retain(|&i| weight(logits[i]) >= f64::from(params.min_p));
    if params.top_k > 0 {
        order.truncate(params.top_k as usize);
    }
    let total: f64 = order.iter().map(|&i| weight(logits[i])).sum();
    let mut held = 0.0;
    let mut result = vec![0.0; logits.len()];
    for &i in &order {
        result[i] = weight(logits[i]) / total;
        held += result[i];
        if held >= f64::from(params.top_p) {
            break;
        }
    }
    let kept: f64 = result.iter().sum();
    result.iter().map(|p| p / kept).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn draws_follow_the_distribution(
        seed in any::<u64>(), n in 2usize..30, temperature in 0.2f32..3.0,
        top_k in 0u32..12, top_p in prop::sample::select(&[1.0f32, 0.95, 0.7, 0.31][..]),
        min_p in prop::sample::select(&[0.0f32, 0.0, 0.05, 0.4][..]),
    ) {
        const DRAWS: usize = 4000;
        let params = SamplingParams { temperature, top_k, top_p, min_p, seed, ..SamplingParams::default() };
        let mut case = Case::new(noise(seed, n), params);
        let want = distribution(&case.logits, &case.params);
        let mut counts = vec![0usize; n];
        for i in 0..DRAWS {
            case.params.seed = seed.wrapping_add(i as u64);
            counts[case.token() as usize] += 1;
        }
        for (id, (&count, p)) in counts.iter().zip(want).enumerate() {
            let (mean, deviation) = (p * DRAWS as f64, (p * (1.0 - p) * DRAWS as f64).sqrt());
            // A cut right at a boundary of top-p may fall either way in f32.
            prop_assert!((count as f64 - mean).abs() <= 6.0 * deviation + 2.0, "token {id}: {count} of {mean}");
            prop_assert!(p > 0.0 || count == 0, "token {id} has probability 0");
        }
    }

    #[test]
    fn narrow_filters_are_greedy(seed in any::<u64>(), n in 1usize..400, temperature in 0.1f32..5.0) {
        let base = SamplingParams { temperature, seed, ..SamplingParams::default() };
        let greedy = Case::new(noise(seed, n), SamplingParams::greedy()).token();
        for params in [
            SamplingParams { top_p: 1e-6, ..base.clone() },
            SamplingParams { top_k: 1, ..base.clone() },
            SamplingParams { min_p: 1.0, ..base.clone() },
            SamplingParams { temperature: 1e-6, ..base.clone() },
        ] {
            prop_assert_eq!(Case::new(noise(seed, n), params).token(), greedy);
        }
    }

    #[test]
    fn penalties_do_what_they_say(
        seed in any::<u64>(), n in 2usize..20,
        context in prop::collection::vec(0u32..20, 1..40), prompt in 0usize..40,
        repetition in prop::sample::select(&[1.0f32, 0.7, 1.3, 2.0][..]),
        presence in prop::sample::select(&[0.0f32, 1.5, -0.5][..]),
        frequency in prop::sample::select(&[0.0f32, 0.4, -0.2][..]),
        bias in prop::collection::vec((0u32..20, -5.0f32..5.0), 0..4),
    ) {
        let params = SamplingParams {
            repetition_penalty: repetition,
            presence_penalty: presence,
            frequency_penalty: frequency,
            logit_bias: bias.clone(),
            ..SamplingParams::greedy()
        };
        let mut case = Case::new(noise(seed, n), params);
        case.prompt_len = prompt.min(context.len());
        case.context = context;
        let answer = &case.context[case.prompt_len..];
        let mut want = case.logits.clone();
        for (id, l) in want.iter_mut().enumerate() {
            let id = id as TokenId;
            bias.iter().filter(|(b, _)| *b == id).for_each(|(_, b)| *l += b);
            if case.context.contains(&id) {
                *l = if *l > 0.0 { *l / repetition } else { *l * repetition };
            }
            let count = answer.iter().filter(|t| **t == id).count();
            if count > 0 {
                *l -= frequency * count as f32 + presence;
            }
        }
        let (sample, columns) = case.run();
        let best = want.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        prop_assert!(want[sample.token as usize] > best - 1e-5);
        // Probabilities are those before the penalties.
        let raw = Case::new(case.logits.clone(), SamplingParams::greedy()).run().1;
        prop_assert_eq!(&columns.logsumexp, &raw.logsumexp);
        prop_assert_eq!(&columns.entropy, &raw.entropy);
        prop_assert!((sample.logprob - (case.logits[sample.token as usize] - raw.logsumexp[0])).abs() < 1e-5);
        prop_assert_eq!(columns.candidate_prob[0], sample.logprob.exp());
    }

    #[test]
    fn masked_tokens_do_not_exist(
        seed in any::<u64>(), n in 3usize..60, masked in prop::collection::btree_set(0u32..60, 1..8), temperature in 0f32..2.0,
    ) {
        let masked: Vec<TokenId> = masked.into_iter().collect();
        let mut case = Case::new(noise(seed, n), SamplingParams { temperature, seed, top_logprobs: Some(20), ..SamplingParams::default() });
        case.wanted.top_k = 4;
        case.wanted.token_logits = vec![2, 0];
        case.masked = masked.clone();
        let (sample, columns) = case.run();
        let left: Vec<f32> = (0..n).filter(|i| !masked.contains(&(*i as TokenId))).map(|i| case.logits[i]).collect();
        prop_assert_eq!(&columns.token_logits, &[case.logits[2], case.logits[0]], "raw, masked or not");
        if left.is_empty() {
            prop_assert!(!sample.finite);
            return Ok(());
        }
        // The same without the tokens.
        let mut short = Case::new(left.clone(), SamplingParams { top_logprobs: Some(20), ..SamplingParams::greedy() });
        short.wanted.top_k = 4;
        let (best, want) = short.run();
        prop_assert!(!masked.contains(&sample.token));
        prop_assert!(sample.top_logprobs.iter().all(|(id, _)| !masked.contains(id)));
        prop_assert_eq!(sample.top_logprobs.len(), left.len().min(20));
        prop_assert!((sample.top_logprobs[0].1 - best.logprob).abs() < 1e-5);
        prop_assert_eq!(&columns.topk_values, &want.topk_values);
        for (got, want) in [
            (&columns.entropy, &want.entropy),
            (&columns.entropy_norm, &want.entropy_norm),
            (&columns.top1_prob, &want.top1_prob),
            (&columns.margin, &want.margin),
            (&columns.logsumexp, &want.logsumexp),
        ] {
            prop_assert!((got[0] - want[0]).abs() < 1e-5);
        }
        prop_assert!((columns.entropy_norm[0] * (left.len() as f32).ln() - columns.entropy[0]).abs() < 1e-5);
    }

    #[test]
    fn noise_is_a_function_of_seed_position_and_model(
        seed in any::<u64>(), length in 1usize..50, contents in prop::collection::vec(0u32..40, 50), prompt in 0usize..50,
    ) {
        let params = SamplingParams { seed, temperature: 1.5, ..SamplingParams::default() };
        let mut case = Case::new(noise(1, 40), params);
        case.context = vec![7; length];
        let token = case.token();
        case.context = contents[..length].to_vec();
        case.prompt_len = prompt.min(length);
        case.params.top_logprobs = Some(3);
        case.wanted = SignalRequest::default();
        prop_assert_eq!(case.token(), token);
    }
}

#[test]
fn noise_changes_with_seed_position_and_model() {
    let params = SamplingParams { temperature: 3.0, ..SamplingParams::default() };
    let mut case = Case::new(noise(1, 200), params);
    let (mut seeds, mut positions, mut models) = (Vec::new(), Vec::new(), Vec::new());
    for i in 0..40 {
        case.params.seed = i;
        seeds.push(case.token());
        case.params.seed = 0;
        models.push(case.run_on(ModelId(i as u32)).0.token);
        case.context = vec![0; i as usize + 1];
        positions.push(case.token());
        case.context = vec![0, 1];
    }
    for mut tokens in [seeds, positions, models] {
        tokens.sort_unstable();
        tokens.dedup();
        assert!(tokens.len() > 15, "{tokens:?}");
    }
}

#[test]
fn the_noise_is_the_position_of_the_sampled_token() {
    let mut case = Case::new(vec![0.0; 1000], SamplingParams { seed: 9, ..SamplingParams::default() });
    case.context = vec![1; 17];
    let want = random::uniform(9, 17, u64::from(MODEL.0)) * 1000.0;
    assert_eq!(case.token(), want as TokenId);
}

#[test]
fn ties_go_to_the_lowest_id() {
    assert_eq!(Case::new(vec![1.0, 5.0, 5.0, 2.0], SamplingParams::greedy()).token(), 1);
    let params = SamplingParams { top_k: 2, ..SamplingParams::default() };
    for seed in 0..200 {
        let case = Case::new(vec![0.0, 1.0, 1.0, 1.0], SamplingParams { seed, ..params.clone() });
        assert!([1, 2].contains(&case.token()));
    }
}

#[test]
fn end_tokens_wait_for_min_tokens() {
    let mut case = Case::new(vec![0.0, 1.0, 9.0, 8.0, 2.0], SamplingParams::greedy());
    case.params.stop_token_ids = vec![3];
    case.params.min_tokens = 2;
    assert_eq!(case.prompt_len, 1);
    assert_eq!(case.token(), 4, "token 2 of the answer");
    case.context.push(4);
    assert_eq!(case.token(), EOS, "token 3 of the answer");
    case.params.min_tokens = 3;
    case.params.ignore_eos = true;
    assert_eq!(case.token(), 4);
}

#[test]
fn bug_14_min_tokens_holds_all_ends_back() {
    let mut logits = vec![0.0; 8];
    (logits[2], logits[3], logits[4], logits[5]) = (9.0, 8.0, 7.0, 1.0);
    let mut params = SamplingParams { stop_token_ids: vec![4], min_tokens: 3, ..SamplingParams::greedy() };
    for (temperature, top_p) in [(0.0, 1.0), (1.0, 0.1), (0.3, 1.0)] {
        (params.temperature, params.top_p) = (temperature, top_p);
        for written in 0..5 {
            for seed in 0..20 {
                params.seed = seed;
                let context = vec![0; 1 + written];
                let row = Row { context: &context, prompt_len: 1, params: &params, masked: &[], allowed: &[] };
                let mut sampler = Sampler::new(MODEL, vec![2, 3]);
                let sample =
                    sampler.sample(&mut logits.clone(), &row, &SignalRequest::default(), &mut Columns::default());
                // The fourth token is the first one that may end the answer.
                assert!(written >= 3 || ![2, 3, 4].contains(&sample.token), "{written}: {}", sample.token);
                assert!(written < 3 || temperature > 0.0 || sample.token == 2);
            }
        }
    }
}

#[test]
fn bug_30_logprobs_are_the_models_own() {
    let logits = noise(4, 60);
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let norm = f64::from(max) + logits.iter().map(|&l| f64::from(l - max).exp()).sum::<f64>().ln();
    let own = |id: TokenId| f64::from(logits[id as usize]) - norm;
    let changed = SamplingParams {
        temperature: 1.7,
        top_k: 9,
        top_p: 0.9,
        repetition_penalty: 1.3,
        presence_penalty: 0.5,
        logit_bias: vec![(7, 4.0)],
        ..SamplingParams::default()
    };
    for params in [SamplingParams::greedy(), changed] {
        for seed in 0..20 {
            let params = SamplingParams { seed, top_logprobs: Some(5), ..params.clone() };
            let greedy = params.temperature == 0.0;
            let (sample, _) = Case::new(logits.clone(), params).run();
            assert!((f64::from(sample.logprob) - own(sample.token)).abs() < 1e-4);
            assert_eq!(sample.top_logprobs.len(), 5);
            assert!(sample.top_logprobs.is_sorted_by(|a, b| a.1 >= b.1));
            assert!(sample.top_logprobs.iter().all(|&(id, value)| (f64::from(value) - own(id)).abs() < 1e-4));
            if greedy {
                assert_eq!(sample.top_logprobs[0], (sample.token, sample.logprob));
            }
        }
    }
}

#[test]
fn logits_that_are_not_finite() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut case = Case::new(noise(1, 50), SamplingParams::default());
        case.logits[17] = bad;
        case.wanted.top_k = 2;
        let (sample, columns) = case.run();
        assert!(!sample.finite);
        assert!(columns.entropy[0].is_nan() && columns.margin[0].is_nan() && columns.candidate_prob[0].is_nan());
        assert_eq!((columns.topk_values.len(), &columns.topk_ids[..]), (2, &[NO_TOKEN; 2][..]));
        // Unless the token is masked.
        case.masked = vec![17];
        assert!(case.run().0.finite);
    }
    let case = Case::new(vec![f32::NEG_INFINITY; 5], SamplingParams::default());
    assert!(!case.run().0.finite);
    let mut overflowing = Case::new(vec![3e38; 5], SamplingParams::default());
    overflowing.params.logit_bias = vec![(0, 3e38)];
    let (sample, columns) = overflowing.run();
    assert!(!sample.finite && columns.entropy[0].is_finite() && columns.candidate_prob[0].is_nan());
}

#[test]
fn impossible_tokens_are_not_sampled() {
    let mut logits = vec![f32::NEG_INFINITY; 100];
    (logits[40], logits[60]) = (0.0, -1.0);
    for seed in 0..100 {
        for (top_k, top_p) in [(0, 1.0), (50, 1.0), (0, 0.99), (3, 0.99)] {
            let params = SamplingParams { seed, top_k, top_p, temperature: 4.0, ..SamplingParams::default() };
            assert!([40, 60].contains(&Case::new(logits.clone(), params).token()));
        }
    }
}

#[test]
fn a_nucleus_wider_than_the_first_selection() {
    // All tokens equal: half the probability is the lower half of the ids.
    let n = 40_000;
    let params = SamplingParams { top_p: 0.5, ..SamplingParams::default() };
    let tokens: Vec<TokenId> =
        (0..60).map(|seed| Case::new(vec![0.5; n], SamplingParams { seed, ..params.clone() }).token()).collect();
    assert!(tokens.iter().all(|&t| t <= 20_000));
    assert!(tokens.iter().any(|&t| t > 15_000), "{tokens:?}");
}

#[test]
fn columns_nobody_asked_for_stay_empty() {
    let mut case = Case::new(noise(1, 10), SamplingParams::greedy());
    case.wanted.scalars = SignalSet::MARGIN;
    let (_, columns) = case.run();
    assert_eq!(columns, Columns { margin: columns.margin.clone(), ..Columns::default() });
    assert_eq!(columns.margin.len(), 1);
}

#[test]
fn what_is_not_allowed_is_not_drawn_and_changes_no_signal() {
    let free = Case::new(noise(4, 70), SamplingParams { top_logprobs: Some(3), ..SamplingParams::greedy() });
    let (best, signals) = free.run();
    let mut bits = vec![u32::MAX; 3];
    bits[best.token as usize / 32] &= !(1 << (best.token % 32));
    // The end token is in the bits, so `min_tokens` says nothing about it.
    let params = SamplingParams { min_tokens: 50, logit_bias: vec![(EOS, 100.0)], ..free.params.clone() };
    let case = Case { allowed: bits, params, ..free };
    let (sample, of) = case.run();
    assert_eq!(sample.token, EOS);
    let raw = |id: TokenId| case.logits[id as usize] - signals.logsumexp[0];
    assert!((sample.logprob - raw(EOS)).abs() < 1e-5, "{} is not {}", sample.logprob, raw(EOS));
    assert_eq!(
        (&of.entropy, &of.logsumexp, sample.top_logprobs),
        (&signals.entropy, &signals.logsumexp, best.top_logprobs)
    );
    // Nothing is left.
    let none = Case { allowed: vec![0, 0, 0], ..case };
    assert!(!none.run().0.finite);
}

#[test]
fn short_vocabularies_are_filled_up() {
    let mut case = Case::new(vec![1.0, 3.0, 2.0], SamplingParams::greedy());
    case.wanted.top_k = 4;
    case.masked = vec![2];
    let (_, columns) = case.run();
    assert_eq!(columns.topk_ids, [1, 0, NO_TOKEN, NO_TOKEN]);
    assert_eq!(columns.topk_values, [3.0, 1.0, f32::NEG_INFINITY, f32::NEG_INFINITY]);
}
