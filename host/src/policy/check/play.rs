//! Made-up requests that live as in a server: steps, hand-offs, visits, drafts and their verification. No
//! model computes anything; candidates and signals are drawn by seed, position and model alone.

use tokenrouter_plugin_api::{
    Acceptance, Decision, DecisionKind, Handoff, ModelDescription, ModelIndex, NO_MODEL, NO_TOKEN, PeerView,
    RequestView, Slot, TokenId, random,
};

use super::rows::{Row, Rows, Signals, meaning};
use super::setup::VOCABULARY;
use super::watched::Watched;

const PROMPT: usize = 8;
const MAX_TOKENS: usize = 24;
/// A request that is handed round this often without a token stays, as in a server.
const MOST_HANDOFFS: u32 = 32;
/// Streams of random numbers; see [`random::uniform`].
const CANDIDATES: u64 = 40_000;

/// One thing that a policy did.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    pub request: u64,
    /// What it did about which token, for example `token 3 at small: Stay`.
    pub what: String,
}

struct Request {
    id: u64,
    slot: Slot,
    seed: u64,
    /// The prompt, committed tokens, provisional tokens.
    tokens: Vec<TokenId>,
    provisional: usize,
    at: usize,
    last: Option<usize>,
    /// Who gets the request back, after how many more tokens.
    visit: Option<(usize, u32)>,
    verifying: bool,
    /// By model: how many tokens it holds.
    held: Vec<usize>,
    handoffs: u32,
}

impl Request {
    fn new(id: u64, slot: Slot, models: usize) -> Self {
        let seed = Row::first(id as usize).seed;
        let tokens = (0..PROMPT as u64).map(|at| token(seed, at, 99)).collect();
        let held = vec![0; models];
        Self {
            id,
            slot,
            seed,
            tokens,
            provisional: 0,
            at: 0,
            last: None,
            visit: None,
            verifying: false,
            held,
            handoffs: 0,
        }
    }

    fn generated(&self) -> usize {
        self.tokens.len() - PROMPT
    }

    fn committed(&self) -> usize {
        self.tokens.len() - self.provisional
    }

    fn view(&self, held: usize, candidate: TokenId) -> RequestView<'_> {
        let tokens = &self.tokens[..held];
        let mut view = RequestView::new(self.id, self.slot, self.seed, PROMPT as u32, MAX_TOKENS as u32, tokens);
        view.candidate = candidate;
        view.provisional = held.saturating_sub(self.committed()) as u32;
        view
    }

    /// The rows of its next step: on a verifying visit one for each provisional token and one behind them.
    fn rows(&self) -> Vec<Row> {
        let first = if self.verifying { self.committed() } else { self.tokens.len() };
        let row = |at: usize| {
            let position = (at - PROMPT) as u32;
            let draft = self.tokens.get(at).copied().unwrap_or(NO_TOKEN);
            let own = token(self.seed, u64::from(position), self.at as u64);
            let agrees = random::uniform(self.seed, u64::from(position), CANDIDATES + 100) < 0.7;
            Row {
                request: self.id,
                slot: self.slot,
                seed: self.seed,
                position,
                candidate: if agrees && draft != NO_TOKEN { draft } else { own },
                draft,
                last_model: self.last.map_or(NO_MODEL, |model| model as ModelIndex),
                remaining: (MAX_TOKENS as u32).saturating_sub(position).max(1),
            }
        };
        (first..=self.tokens.len()).map(row).collect()
    }

    /// Keep only the first `kept` tokens, all of them committed.
    fn settle(&mut self, kept: usize) {
        self.tokens.truncate(kept);
        self.provisional = 0;
        self.held.iter_mut().for_each(|held| *held = (*held).min(kept));
    }
}

fn token(seed: u64, position: u64, model: u64) -> TokenId {
    (random::uniform(seed, position, CANDIDATES + model) * f64::from(VOCABULARY)) as TokenId
}

/// Requests on the instances of one route.
pub struct Play<'a> {
    team: &'a mut [Watched],
    models: &'a [ModelDescription],
    signals: Signals,
    events: Vec<Event>,
}

impl<'a> Play<'a> {
    pub fn new(team: &'a mut [Watched], models: &'a [ModelDescription], signals: Signals) -> Self {
        Self { team, models, signals, events: Vec::new() }
    }

    /// Let the requests with these ids live, in slots from 0 on, until all are finished. The error says which
    /// hook did what.
    pub fn run(mut self, ids: impl Iterator<Item = u64>) -> Result<Vec<Event>, String> {
        let models = self.models.len();
        let mut requests: Vec<_> = ids.zip(0..).map(|(id, slot)| Request::new(id, slot, models)).collect();
        for request in &mut requests {
            let answer = self.team[0].entry(&request.view(PROMPT, NO_TOKEN)).map_err(|e| e.to_string())?;
            let entry = answer.map_or(0, |model| model as usize);
            if entry >= models {
                return Err(format!("entry answers model {entry}, and the route has {models}"));
            }
            request.at = entry;
        }
        while !requests.is_empty() {
            // Who arrives in a turn is asked about in the next one.
            let at: Vec<usize> = requests.iter().map(|request| request.at).collect();
            for model in 0..models {
                let here = requests.iter_mut().zip(&at).filter(|(_, at)| **at == model).map(|(request, _)| request);
                self.step(model, here.collect())?;
            }
            for request in requests.extract_if(.., |request| request.committed() >= PROMPT + MAX_TOKENS) {
                for instance in self.team.iter_mut() {
                    instance.finished(request.slot).map_err(|e| e.to_string())?;
                }
            }
        }
        Ok(self.events)
    }

    fn step(&mut self, model: usize, mut requests: Vec<&mut Request>) -> Result<(), String> {
        // About the last token of a visit nobody is asked.
        let unasked = |request: &Request| request.visit.is_some_and(|(_, left)| left <= 1) && !request.verifying;
        for request in &mut requests {
            request.held[model] = request.tokens.len();
        }
        for request in requests.extract_if(.., |request| unasked(request)) {
            if let [row] = request.rows()[..] {
                self.commit(request, row.candidate)?;
            }
        }
        let rows: Vec<Vec<Row>> = requests.iter().map(|request| request.rows()).collect();
        let flat: Vec<Row> = rows.iter().flatten().copied().collect();
        if flat.is_empty() {
            return Ok(());
        }
        let instance = &mut self.team[model];
        let columns = Rows::new(&flat, model as ModelIndex, instance.requirements(), self.signals);
        let mut out = vec![Decision::STAY; flat.len()];
        instance.route(&columns.batch(), &mut out).map_err(|e| e.to_string())?;
        let mut decisions = out.as_slice();
        for (request, rows) in requests.into_iter().zip(rows) {
            let (own, others) = decisions.split_at(rows.len());
            decisions = others;
            self.decide(request, &rows, own)?;
        }
        Ok(())
    }

    /// Apply the decisions about one request.
    fn decide(&mut self, request: &mut Request, rows: &[Row], decisions: &[Decision]) -> Result<(), String> {
        let name = &self.models[request.at].name;
        for (row, &decision) in rows.iter().zip(decisions) {
            let kind = meaning(decision, self.models).map_err(|e| {
                format!("route at model `{name}` answers {decision:?} about token {}: {e}", row.position)
            })?;
            self.events
                .push(Event { request: request.id, what: format!("token {} at {name}: {kind:?}", row.position) });
            if kind == DecisionKind::Accept && row.draft != NO_TOKEN {
                continue;
            }
            if request.verifying {
                request.settle(PROMPT + row.position as usize);
                request.verifying = false;
            }
            let candidate = decision.replacement().unwrap_or(row.candidate);
            return match kind {
                DecisionKind::To(to) if to as usize != request.at && request.handoffs < MOST_HANDOFFS => {
                    self.hand_over(request, to as usize, candidate)
                }
                DecisionKind::Draft if row.remaining > 1 => {
                    request.tokens.push(candidate);
                    request.provisional += 1;
                    Ok(())
                }
                _ => self.commit(request, candidate),
            };
        }
        Ok(())
    }

    /// Commit what is provisional and `candidate`.
    fn commit(&mut self, request: &mut Request, candidate: TokenId) -> Result<(), String> {
        let written = request.provisional as u32 + 1;
        request.tokens.push(candidate);
        (request.provisional, request.handoffs) = (0, 0);
        request.held[request.at] = request.tokens.len();
        if let Some((home, left)) = request.visit {
            request.visit = (left > written).then_some((home, left.saturating_sub(written)));
            if request.visit.is_none() && request.generated() < MAX_TOKENS {
                return self.arrive(request, home, &[]);
            }
        }
        Ok(())
    }

    fn hand_over(&mut self, request: &mut Request, to: usize, candidate: TokenId) -> Result<(), String> {
        let from = request.at;
        let view = request.view(request.tokens.len(), candidate);
        let handoff = self.team[from].send(&view, to as ModelIndex).map_err(|e| e.to_string())?;
        let (name, peer) = (&self.models[from].name, &self.models[to].name);
        let what = format!("hand-off from {name} to {peer}: {handoff:?}");
        self.events.push(Event { request: request.id, what });
        let Handoff { keep_candidate, budget, rollback, verify, payload, .. } = handoff;
        let dropped = (rollback as usize).min(request.provisional);
        request.tokens.truncate(request.tokens.len() - dropped);
        request.provisional -= dropped;
        if keep_candidate && rollback == 0 && request.generated() < MAX_TOKENS {
            request.tokens.push(candidate);
            request.provisional += 1;
        }
        if !verify {
            request.provisional = 0;
        }
        request.handoffs += 1;
        request.visit = budget.map(|tokens| (from, tokens.max(1)));
        self.arrive(request, to, &payload)
    }

    fn arrive(&mut self, request: &mut Request, to: usize, payload: &[u8]) -> Result<(), String> {
        let from = std::mem::replace(&mut request.at, to);
        request.last = Some(from);
        let all = request.tokens.len();
        request.held.iter_mut().for_each(|held| *held = (*held).min(all));
        request.held[from] = all;
        let held = request.held[to];
        let message = PeerView::new(from as ModelIndex, &request.tokens[held..], request.provisional as u32, payload);
        let view = request.view(held, NO_TOKEN);
        let acceptance = self.team[to].receive(&view, &message).map_err(|e| e.to_string())?;
        let name = &self.models[to].name;
        self.events.push(Event { request: request.id, what: format!("arrives at {name}: {acceptance:?}") });
        request.verifying = match acceptance {
            Acceptance::Accept(tokens) if tokens as usize > request.provisional => {
                let provisional = request.provisional;
                return Err(format!("receive at model `{name}` accepts {tokens} of {provisional} provisional tokens"));
            }
            Acceptance::Accept(tokens) => {
                request.settle(request.committed() + tokens as usize);
                false
            }
            _ => request.provisional > 0,
        };
        Ok(())
    }
}
