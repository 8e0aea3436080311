//! One request of a trace before a policy: along the recorded course, and on the policy's own.

use std::collections::HashMap;

use tokenrouter_plugin_api::{DecisionKind, Handoff, NO_TOKEN, PeerView, TokenId};

use super::team::view;
use super::{Answer, Request, Row, Team, Trace};
use crate::policy::PolicyFailure;

/// A request that is handed round this often without a token stays, as in a server.
const MOST_IDLE_HANDOFFS: u32 = 32;

#[derive(Debug, thiserror::Error)]
pub enum PlayError {
    #[error(transparent)]
    Failed(#[from] PolicyFailure),
    #[error(
        "request {request}, token {position}: the policy {what}; a replay follows policies that stay and hand over, measure others with `tokenrouter eval`"
    )]
    Unfollowed { request: u64, position: u32, what: &'static str },
}

/// Where a policy first decides otherwise than was recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    pub position: u32,
    pub model: String,
    pub candidate: TokenId,
    pub recorded: String,
    pub chosen: String,
    /// What the policy saw, by name.
    pub signals: Vec<(String, f32)>,
}

/// What came of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Played {
    pub id: u64,
    /// By name of the writer, for each token.
    pub recorded: Vec<String>,
    pub chosen: Vec<String>,
    pub recorded_handoffs: u32,
    pub handoffs: u32,
    /// Tokens of the policy's own course at which the model whose turn it was has no row: nobody was asked.
    pub unasked: usize,
    /// Rows along the recorded course of which the recorded decision is known, and those decided alike.
    pub compared: usize,
    pub alike: usize,
    pub first: Option<Difference>,
}

/// Put all requests of `trace` before the policy; `along` and `own` are two teams of it.
pub fn play(trace: &Trace, along: &mut Team<'_>, own: &mut Team<'_>) -> Result<Vec<Played>, PlayError> {
    trace.requests.iter().map(|request| one(trace, request, along, own)).collect()
}

fn one(trace: &Trace, request: &Request, along: &mut Team<'_>, own: &mut Team<'_>) -> Result<Played, PlayError> {
    let (compared, alike, first) = follow(trace, request, along)?;
    let course = course(request, own)?;
    let name = |&model: &usize| trace.models[model].clone();
    Ok(Played {
        id: request.id,
        recorded: request.writers.iter().map(name).collect(),
        chosen: course.writers.iter().map(|&model| own.models[model].name.clone()).collect(),
        recorded_handoffs: request.handoffs,
        handoffs: course.handoffs,
        unasked: course.unasked,
        compared,
        alike,
        first,
    })
}

/// The rows as they were recorded: each is decided, and the request goes where it went.
fn follow(
    trace: &Trace,
    request: &Request,
    team: &mut Team<'_>,
) -> Result<(usize, usize, Option<Difference>), PlayError> {
    let all: Vec<TokenId> = request.prompt.iter().chain(&request.tokens).copied().collect();
    let mut held = vec![0; team.models.len()];
    let (mut at, mut last, mut payload) = (None, None, Vec::new());
    let (mut compared, mut alike, mut first) = (0, 0, None);
    team.entry(&view(request, &request.prompt, NO_TOKEN))?;
    for row in &request.rows {
        let Some(model) = team.route_model[row.model] else { continue };
        let before = &all[..all.len().min(request.prompt.len() + row.position as usize)];
        if let Some(from) = at.filter(|&from| from != model) {
            let had = held[model].min(before.len());
            let message = PeerView::new(from as u32, &before[had..], 0, &payload);
            team.receive(model, &view(request, &before[..had], NO_TOKEN), &message)?;
            (last, payload) = (Some(from), Vec::new());
        }
        at = Some(model);
        held[model] = before.len();
        if !row.asked {
            continue;
        }
        let kind = team.route(model, request, row, last)?;
        if let DecisionKind::To(to) = kind {
            payload = team.send(model, &view(request, before, row.candidate), to as usize)?.payload;
        }
        let Some(answer) = row.answer else { continue };
        compared += 1;
        if same(team, kind, answer) {
            alike += 1;
        } else if first.is_none() {
            first = Some(Difference {
                position: row.position,
                model: team.models[model].name.clone(),
                candidate: row.candidate,
                recorded: match answer {
                    Answer::Stay => "stay".to_owned(),
                    Answer::Draft => "draft".to_owned(),
                    Answer::Accept => "accept".to_owned(),
                    Answer::To(model) => format!("to {}", trace.models[model]),
                },
                chosen: match kind {
                    DecisionKind::Stay => "stay".to_owned(),
                    DecisionKind::Draft => "draft".to_owned(),
                    DecisionKind::Accept => "accept".to_owned(),
                    DecisionKind::To(model) => format!("to {}", team.models[model as usize].name),
                },
                signals: team.seen(model, row),
            });
        }
    }
    team.finished()?;
    Ok((compared, alike, first))
}

fn same(team: &Team<'_>, kind: DecisionKind, answer: Answer) -> bool {
    match (kind, answer) {
        (DecisionKind::To(to), Answer::To(model)) => team.route_model.get(model) == Some(&Some(to as usize)),
        (DecisionKind::Stay, Answer::Stay)
        | (DecisionKind::Draft, Answer::Draft)
        | (DecisionKind::Accept, Answer::Accept) => true,
        _ => false,
    }
}

/// The policy's own course over as many tokens as were recorded.
struct Course<'r> {
    request: &'r Request,
    /// By position and model of the route, the last row.
    rows: HashMap<(u32, usize), &'r Row>,
    tokens: Vec<TokenId>,
    writers: Vec<usize>,
    /// By model: how many tokens it holds.
    held: Vec<usize>,
    at: usize,
    last: Option<usize>,
    /// Who gets the request back, after how many more tokens.
    visit: Option<(usize, u32)>,
    handoffs: u32,
    idle: u32,
    unasked: usize,
}

fn course<'r>(request: &'r Request, team: &mut Team<'_>) -> Result<Course<'r>, PlayError> {
    let rows = request.rows.iter();
    let rows = rows.filter_map(|row| Some(((row.position, team.route_model[row.model]?), row))).collect();
    let mut course = Course {
        request,
        rows,
        tokens: request.prompt.clone(),
        writers: Vec::new(),
        held: vec![0; team.models.len()],
        at: team.entry(&view(request, &request.prompt, NO_TOKEN))?,
        last: None,
        visit: None,
        handoffs: 0,
        idle: 0,
        unasked: 0,
    };
    while course.writers.len() < request.writers.len() {
        course.step(team)?;
    }
    team.finished()?;
    Ok(course)
}

impl Course<'_> {
    fn step(&mut self, team: &mut Team<'_>) -> Result<(), PlayError> {
        let position = self.writers.len() as u32;
        let row = self.rows.get(&(position, self.at)).copied();
        self.held[self.at] = self.tokens.len();
        let text = self.request.tokens.get(self.writers.len()).copied().unwrap_or(NO_TOKEN);
        let candidate = row.map_or(text, |row| row.candidate);
        // About the last token of a visit nobody is asked.
        let asks = self.visit.is_none_or(|(_, left)| left > 1);
        let kind = match row.filter(|_| asks) {
            Some(row) => team.route(self.at, self.request, row, self.last)?,
            None => DecisionKind::Stay,
        };
        self.unasked += usize::from(asks && row.is_none());
        let unfollowed = |what| PlayError::Unfollowed { request: self.request.id, position, what };
        match kind {
            DecisionKind::Draft => Err(unfollowed("keeps a draft")),
            DecisionKind::To(to) if self.idle < MOST_IDLE_HANDOFFS => {
                let handoff = team.send(self.at, &view(self.request, &self.tokens, candidate), to as usize)?;
                if handoff.verify || handoff.rollback > 0 {
                    return Err(unfollowed("hands over tokens to verify"));
                }
                self.hand_over(team, to as usize, candidate, handoff)
            }
            DecisionKind::Stay | DecisionKind::Accept | DecisionKind::To(_) => self.commit(team, candidate),
        }
    }

    fn hand_over(
        &mut self,
        team: &mut Team<'_>,
        to: usize,
        candidate: TokenId,
        handoff: Handoff,
    ) -> Result<(), PlayError> {
        let Handoff { keep_candidate, budget, payload, .. } = handoff;
        let from = self.at;
        if keep_candidate {
            self.write(candidate);
        }
        self.visit = budget.map(|tokens| (from, tokens.max(1)));
        self.arrive(team, to, &payload)
    }

    fn write(&mut self, token: TokenId) {
        self.tokens.push(token);
        self.writers.push(self.at);
        self.idle = 0;
    }

    fn commit(&mut self, team: &mut Team<'_>, token: TokenId) -> Result<(), PlayError> {
        self.write(token);
        if let Some((from, left)) = &mut self.visit {
            *left -= 1;
            if *left == 0 {
                let from = *from;
                self.visit = None;
                return self.arrive(team, from, &[]);
            }
        }
        Ok(())
    }

    fn arrive(&mut self, team: &mut Team<'_>, to: usize, payload: &[u8]) -> Result<(), PlayError> {
        let from = std::mem::replace(&mut self.at, to);
        self.last = Some(from);
        self.handoffs += 1;
        self.idle += 1;
        self.held[from] = self.tokens.len();
        // After the last token the request has ended: it is handed nowhere.
        if self.writers.len() >= self.request.writers.len() {
            self.handoffs -= 1;
            return Ok(());
        }
        let had = self.held[to];
        let message = PeerView::new(from as u32, &self.tokens[had..], 0, payload);
        Ok(team.receive(to, &view(self.request, &self.tokens[..had], NO_TOKEN), &message)?)
    }
}
