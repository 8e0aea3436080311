use super::*;
use tokenrouter_plugin_api::{DecisionKind, ModelDescription, NO_TOKEN, NoServices, random};

use DecisionKind::{Accept, Draft, To};

const SMALL_EOS: &[TokenId] = &[0, 2];
const LARGE_EOS: &[TokenId] = &[0, 1];
/// A stop token of the request.
const STOP: TokenId = 3;

fn create(model: ModelIndex, roles: &[&str], settings: &str) -> Result<Verify, String> {
    let models: Vec<_> =
        roles.iter().map(|role| ModelDescription { name: format!("m-{role}"), role: role.to_string() }).collect();
    let eos = if roles[model as usize] == "slm" { SMALL_EOS } else { LARGE_EOS };
    let services = &NoServices;
    let entry = roles.iter().position(|&role| role == "slm").unwrap_or(0) as ModelIndex;
    let context = Context { route: "r", model, models: &models, entry, vocab_size: 10, eos, services };
    Verify::create(&context, settings).map_err(|e| e.message)
}

fn drafting(tokens: u32) -> Verify {
    create(0, &["slm", "llm"], &format!(r#"{{"draft_tokens": {tokens}}}"#)).unwrap()
}

fn verifying() -> Verify {
    create(1, &["slm", "llm"], "{}").unwrap()
}

#[derive(Clone, Copy, Debug)]
struct Row {
    slot: Slot,
    candidate: TokenId,
    draft: TokenId,
    remaining: u32,
}

fn row(slot: Slot, candidate: TokenId) -> Row {
    Row { slot, candidate, draft: NO_TOKEN, remaining: 99 }
}

fn route(policy: &mut Verify, rows: &[Row]) -> Vec<DecisionKind> {
    let batch = RouteBatch {
        request_ids: &rows.iter().map(|r| u64::from(r.slot)).collect::<Vec<_>>(),
        slots: &rows.iter().map(|r| r.slot).collect::<Vec<_>>(),
        candidates: &rows.iter().map(|r| r.candidate).collect::<Vec<_>>(),
        drafts: &rows.iter().map(|r| r.draft).collect::<Vec<_>>(),
        remaining: &rows.iter().map(|r| r.remaining).collect::<Vec<_>>(),
        ..RouteBatch::default()
    };
    let mut out = vec![Decision::STAY; rows.len()];
    policy.route(&batch, &mut out);
    assert!(out.iter().all(|decision| decision.replacement().is_none()));
    out.iter().map(|decision| decision.kind().unwrap()).collect()
}

fn each(policy: &mut Verify, rows: &[Row]) -> Vec<DecisionKind> {
    rows.iter().flat_map(|row| route(policy, &[*row])).collect()
}

fn send(policy: &mut Verify, candidate: TokenId) -> Handoff {
    let mut view = RequestView::new(1, 0, 0, 1, 99, &[5]);
    view.candidate = candidate;
    policy.send(&view, 1)
}

#[test]
fn drafts_so_many_and_hands_them_over() {
    let mut policy = drafting(3);
    for _ in 0..2 {
        assert_eq!(each(&mut policy, &[row(0, 7); 3]), [Draft, Draft, To(1)]);
        assert_eq!(send(&mut policy, 7), Handoff::default().verify());
    }
    assert_eq!(each(&mut drafting(1), &[row(0, 7); 2]), [To(1), To(1)]);
    let mut default = create(1, &["llm", "slm"], "{}").unwrap();
    assert_eq!(each(&mut default, &[row(0, 7); 4]), [Draft, Draft, Draft, To(0)]);
}

#[test]
fn an_end_token_is_left_to_the_large_model() {
    let mut policy = drafting(3);
    // Ends at the small model: the round is over, and the token is no draft.
    assert_eq!(each(&mut policy, &[row(0, 7), row(0, 2)]), [Draft, To(1)]);
    assert_eq!(send(&mut policy, 2), Handoff::drop_candidate().verify());
    // Ends at the large model only: a draft like others here, but the large model writes it itself.
    assert_eq!(each(&mut policy, &[row(0, 7), row(0, 1), row(0, 1)]), [Draft, Draft, To(1)]);
    assert_eq!(send(&mut policy, 1), Handoff::default().verify());
    let mut large = verifying();
    assert_eq!(route(&mut large, &[Row { draft: 1, ..row(0, 1) }]), [To(0)]);
    assert_eq!(route(&mut large, &[Row { draft: 2, ..row(0, 2) }]), [Accept]);
    assert_eq!(send(&mut large, 1), Handoff::default());
}

#[test]
fn the_last_token_is_not_drafted() {
    let mut policy = drafting(5);
    let left = |remaining| Row { remaining, ..row(0, 7) };
    assert_eq!(each(&mut policy, &[left(4), left(3), left(2)]), [Draft, Draft, To(1)]);
    assert_eq!(each(&mut policy, &[left(1)]), [To(1)]);
}

#[test]
fn drafts_equal_to_the_own_tokens_stand() {
    let mut policy = verifying();
    let rows = |drafts: &[TokenId], own: &[TokenId]| -> Vec<Row> {
        let drafts = drafts.iter().copied().chain([NO_TOKEN]);
        drafts.zip(own).map(|(draft, &own)| Row { draft, ..row(0, own) }).collect()
    };
    assert_eq!(route(&mut policy, &rows(&[7, 8, 9], &[6, 8, 9, 5])), [To(0), Accept, Accept, To(0)]);
    assert_eq!(route(&mut policy, &rows(&[7, 8, 9], &[7, 6, 9, 5])), [Accept, To(0), Accept, To(0)]);
    assert_eq!(route(&mut policy, &rows(&[7, 8, 9], &[7, 8, 9, 5])), [Accept, Accept, Accept, To(0)]);
    assert_eq!(route(&mut policy, &rows(&[], &[5])), [To(0)]);
    // Two requests in one batch.
    let two = [rows(&[7], &[7, 5]), rows(&[8], &[9, 5])].concat();
    assert_eq!(route(&mut policy, &two), [Accept, To(0), To(0), To(0)]);
    assert_eq!(send(&mut policy, 5), Handoff::default());
}

#[test]
fn requests_do_not_share_a_round() {
    let mut policy = drafting(3);
    assert_eq!(route(&mut policy, &[row(0, 7), row(4, 7)]), [Draft, Draft]);
    assert_eq!(route(&mut policy, &[row(4, 7)]), [Draft]);
    assert_eq!(route(&mut policy, &[row(4, 7), row(0, 7)]), [To(1), Draft]);
    assert_eq!(route(&mut policy, &[row(4, 7), row(0, 7)]), [Draft, To(1)]);
}

#[test]
fn a_reused_slot_starts_a_round() {
    let mut policy = drafting(3);
    assert_eq!(each(&mut policy, &[row(0, 7); 2]), [Draft, Draft]);
    policy.finished(0);
    assert_eq!(each(&mut policy, &[row(0, 7); 3]), [Draft, Draft, To(1)]);
}

/// The token that a made-up model writes after `tokens`. The models agree on four in five.
fn next(seed: u64, large: bool, tokens: &[TokenId]) -> TokenId {
    let hash =
        tokens.iter().fold(seed, |h, &t| (h ^ u64::from(t + 1)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29));
    let agree = random::uniform(hash, 0, 0) < 0.8;
    let draw = random::uniform(hash, 1, u64::from(large && !agree));
    // End and stop tokens are rare, or no answer would be long.
    if draw < 0.12 { (draw * 100.0) as TokenId % 4 } else { 4 + (draw * 1000.0) as TokenId % 6 }
}

/// Whether a token that a model wrote ends the request.
fn ends(token: TokenId, large: bool) -> bool {
    token == STOP || if large { LARGE_EOS } else { SMALL_EOS }.contains(&token)
}

/// The large model's own answer.
fn alone(seed: u64, max_tokens: usize) -> Vec<TokenId> {
    let mut answer = Vec::new();
    while answer.len() < max_tokens && !answer.last().is_some_and(|&token| ends(token, true)) {
        answer.push(next(seed, true, &answer));
    }
    answer
}

/// The answer under the policies, carried out as the host does, and how many drafts of each visit stood.
fn serve(policies: &mut [Verify; 2], seed: u64, max_tokens: usize) -> (Vec<TokenId>, Vec<(usize, usize)>) {
    let (mut tokens, mut committed, mut visits): (Vec<TokenId>, usize, _) = (Vec::new(), 0, Vec::new());
    let [small, large] = policies;
    loop {
        let candidate = next(seed, false, &tokens);
        let remaining = (max_tokens - tokens.len()) as u32;
        assert!(remaining > 0);
        if route(small, &[Row { remaining, ..row(0, candidate) }]) == [Draft] {
            assert!(remaining > 1, "the host would commit the drafts unseen");
            tokens.push(candidate);
            continue;
        }
        let handoff = send(small, candidate);
        assert!(handoff.verify && handoff.rollback == 0 && handoff.budget.is_none());
        tokens.extend(handoff.keep_candidate.then_some(candidate));
        let drafts = tokens.split_off(committed);
        let mut rows = Vec::new();
        for i in 0..=drafts.len() {
            let before = [&tokens[..], &drafts[..i]].concat();
            let draft = drafts.get(i).copied().unwrap_or(NO_TOKEN);
            let remaining = max_tokens.saturating_sub(before.len()) as u32;
            rows.push(Row { draft, remaining, ..row(0, next(seed, true, &before)) });
        }
        let kinds = route(large, &rows);
        let stand = kinds.iter().take_while(|kind| **kind == Accept).count();
        assert_eq!(kinds.get(stand), Some(&To(0)));
        assert_eq!(send(large, rows[stand].candidate), Handoff::default());
        visits.push((stand, drafts.len()));
        let written = drafts[..stand].iter().map(|&draft| (draft, false)).chain([(rows[stand].candidate, true)]);
        for (token, by_large) in written {
            tokens.push(token);
            if ends(token, by_large) || tokens.len() == max_tokens {
                return (tokens, visits);
            }
        }
        committed = tokens.len();
    }
}

#[test]
fn the_answer_is_the_large_models_own() {
    let mut visits = Vec::new();
    for draft_tokens in [1, 2, 4, 7] {
        // One instance after the other request, as slots are reused.
        let mut policies = [drafting(draft_tokens), verifying()];
        for seed in 0..300 {
            let max_tokens = 1 + seed as usize % 31;
            let (answer, mut seen) = serve(&mut policies, seed, max_tokens);
            assert_eq!(answer, alone(seed, max_tokens), "{draft_tokens} drafts, seed {seed}");
            visits.append(&mut seen);
            policies.iter_mut().for_each(|policy| policy.finished(0));
        }
    }
    // Visits without a draft, and with none, some and all of several drafts standing.
    assert!(visits.iter().any(|&(_, drafts)| drafts == 0));
    for drafts in 2..=7 {
        for stand in 0..=drafts {
            assert!(visits.contains(&(stand, drafts)), "{stand} of {drafts}");
        }
    }
    let ended = |token| (0..300).any(|seed| alone(seed, 1 + seed as usize % 31).last() == Some(&token));
    assert!((0..4).filter(|&token| token != 2).all(ended));
}

#[test]
fn refuses_other_roles_and_settings() {
    for roles in [&["slm", "llm", "llm"][..], &["slm", "slm"], &["slm"], &["small", "large"]] {
        let error = create(0, roles, "{}").unwrap_err();
        assert!(error.starts_with("verify needs exactly two models, with the roles \"slm\" and \"llm\""), "{error}");
    }
    let error = |settings: &str| create(0, &["slm", "llm"], settings).unwrap_err();
    for tokens in [0, 65] {
        let message = format!("draft_tokens is {tokens}; set it from 1 to 64");
        assert_eq!(error(&format!(r#"{{"draft_tokens": {tokens}}}"#)), message);
    }
    assert!(error(r#"{"drafts": 3}"#).contains("unknown field `drafts`"));
    assert!(error(r#"{"draft_tokens": 2.5}"#).contains("invalid type"));
}

#[test]
fn the_schema_tells_default_and_bounds() {
    let schema: serde_json::Value = serde_json::from_str(Verify::SETTINGS_SCHEMA).unwrap();
    let setting = &schema["properties"]["draft_tokens"];
    assert_eq!(setting["default"], Settings::default().draft_tokens);
    assert_eq!(setting["maximum"], MAX_DRAFT_TOKENS);
}
