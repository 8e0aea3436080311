//! Asking the questions.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use tokio::signal::unix::Signal;
use tokio::task::JoinSet;

use super::super::asking;
use super::super::build::Prepared;
use super::super::output::Failure;
use super::args::Eval;
use super::bar::Bar;
use super::store::Store;
use crate::api::{Choice, ChoiceError, End, finish_reason};
use crate::engine::{Engine, ServedRoute};
use crate::eval::answer::{AnswerRule, is_right};
use crate::eval::dataset::Question;
use crate::eval::summary::{Point, Row, Summary};
use crate::request::{ModelId, NewRequest, TokenId};

/// What stays the same over all points.
pub struct Session<'a> {
    pub arguments: &'a Eval,
    pub prepared: &'a Prepared,
    pub questions: &'a [Question],
    pub rule: AnswerRule,
    pub store: Store,
    pub interrupt: Signal,
    /// Templates may write the time; all questions get the same.
    pub now: SystemTime,
    /// Tokens of all questions, by entry model.
    pub prompts: HashMap<ModelId, Arc<[Vec<TokenId>]>>,
}

/// An answer, with what it took.
struct Answered {
    index: usize,
    text: String,
    writers: Vec<ModelId>,
    end: End,
    seconds: f64,
}

/// A point at work.
struct Running<'a> {
    engine: &'a Engine,
    point: &'a Point,
    route: Arc<ServedRoute>,
    prompts: Arc<[Vec<TokenId>]>,
}

impl Session<'_> {
    /// Every question can be asked at each of `points`, or the first that cannot.
    pub fn check(&mut self, engine: &Engine, points: &[Point]) -> Result<(), Failure> {
        for point in points {
            let running = self.running(engine, point)?;
            for (index, question) in self.questions.iter().enumerate() {
                engine.check(&self.request(&running, index)).map_err(|e| self.refused(question, &e))?;
            }
        }
        Ok(())
    }

    /// Ask what has no answer yet. `number` says which point it is, for the progress bar.
    pub async fn evaluate(&mut self, engine: &Engine, point: &Point, number: &str) -> Result<Summary, Failure> {
        let running = self.running(engine, point)?;
        let mut todo: Vec<usize> =
            (0..self.questions.len()).rev().filter(|index| !self.store.has(point, *index)).collect();
        let mut so_far = Summary::new(point, &self.store.rows(point));
        let (earlier, start, mut tokens) = (so_far.seconds, Instant::now(), 0);
        let bar = Bar::new(&format!("{number}{}", point.name), self.questions.len());
        bar.show(&so_far, tokens, 0.0);
        let mut asked = JoinSet::new();
        loop {
            while asked.len() < self.arguments.concurrency as usize
                && let Some(index) = todo.pop()
            {
                let request = self.request(&running, index);
                let prompt = request.prompt.clone();
                // What is wrong with the questions was found by `check`.
                let stream = engine.submit(request).map_err(|e| unanswered(point, &self.questions[index], &e))?;
                let (entry, _) = running.route.models[running.route.entry];
                let text = self.prepared.texts[entry.index()].clone();
                let choice = Choice::new(stream, &prompt, text, asking::ending(&running.route, engine));
                asked.spawn(answer(index, choice));
            }
            let answered = tokio::select! {
                answered = asked.join_next() => answered,
                _ = self.interrupt.recv() => return Err(self.interrupted()),
            };
            let Some(answered) = answered else { break };
            let answered = answered.map_err(Failure::work)?;
            let answered = answered.map_err(|(index, e)| unanswered(point, &self.questions[index], &e))?;
            let row = self.row(&running, answered, earlier + start.elapsed().as_secs_f64());
            tokens += row.tokens_by_model.values().sum::<u64>();
            so_far.add(&row);
            bar.show(&so_far, tokens, start.elapsed().as_secs_f64());
            self.store.add(row)?;
        }
        Ok(so_far)
    }

    fn running<'a>(&mut self, engine: &'a Engine, point: &'a Point) -> Result<Running<'a>, Failure> {
        let route = engine.route(&point.name).ok_or_else(|| Failure::work("the point is not in the engine"))?;
        let (entry, _) = route.models[route.entry];
        let prompts = match self.prompts.get(&entry) {
            Some(prompts) => prompts.clone(),
            None => self.tokenise(entry)?,
        };
        Ok(Running { engine, point, route, prompts })
    }

    fn tokenise(&mut self, entry: ModelId) -> Result<Arc<[Vec<TokenId>]>, Failure> {
        let text = &self.prepared.texts[entry.index()];
        let prompt = |question: &Question| {
            let system = self.arguments.system.as_deref();
            let tokens = asking::chat(text, system, &question.question, self.now).ok_or_else(|| {
                let name = &self.prepared.config.models[entry.index()].name;
                Failure::input(format!("model `{name}` has no chat template, so it cannot be asked questions"))
            })?;
            tokens.map_err(|e| self.refused(question, &e))
        };
        let prompts: Arc<[Vec<TokenId>]> = self.questions.iter().map(prompt).collect::<Result<Vec<_>, _>>()?.into();
        self.prompts.insert(entry, prompts.clone());
        Ok(prompts)
    }

    fn request(&self, running: &Running<'_>, index: usize) -> NewRequest {
        let prompt = running.prompts[index].clone();
        // At least one, so that a prompt that leaves no room is refused by the engine with the numbers.
        let room = (running.route.context as usize).saturating_sub(prompt.len()).max(1);
        NewRequest {
            route: running.route.id,
            max_tokens: self.arguments.max_tokens.min(room as u32),
            prompt,
            sampling: asking::sampling(&self.arguments.sampling, index as u64),
            return_signals: false,
            cache_salt: None,
        }
    }

    fn refused(&self, question: &Question, error: &dyn std::fmt::Display) -> Failure {
        Failure::input(format!("{}:{}: {error}", self.arguments.dataset.display(), question.line))
    }

    fn row(&self, running: &Running<'_>, answered: Answered, point_seconds: f64) -> Row {
        let question = &self.questions[answered.index];
        let found = self.rule.find(&answered.text);
        let mut tokens_by_model: BTreeMap<String, u64> =
            running.point.models.iter().map(|model| (model.clone(), 0)).collect();
        for writer in &answered.writers {
            *tokens_by_model.entry(running.engine.models()[writer.index()].name.clone()).or_default() += 1;
        }
        Row {
            point: running.point.name.clone(),
            index: answered.index,
            line: question.line,
            correct: found.as_ref().is_some_and(|found| is_right(found, &question.answer)),
            found,
            expected: question.answer.clone(),
            text: answered.text,
            tokens_by_model,
            switches: answered.writers.windows(2).filter(|pair| pair[0] != pair[1]).count() as u64,
            finish_reason: finish_reason(&answered.end).into(),
            seconds: answered.seconds,
            point_seconds,
        }
    }

    fn interrupted(&self) -> Failure {
        Failure::work(match self.store.path() {
            Some(path) => format!(
                "interrupted; {} answers are kept in {}, and the same command goes on from there",
                self.store.len(),
                path.display()
            ),
            None => "interrupted, and nothing is kept; with --output FILE an evaluation can go on later".into(),
        })
    }
}

/// The question could not be answered, for no fault of its own.
fn unanswered(point: &Point, question: &Question, error: &dyn std::fmt::Display) -> Failure {
    Failure::work(format!("{}, the question of line {}: {error}", point.name, question.line))
}

/// Follow one request to its end. An error comes with the question's index.
async fn answer(index: usize, mut choice: Choice) -> Result<Answered, (usize, ChoiceError)> {
    let start = Instant::now();
    let (mut text, mut writers) = (String::new(), Vec::new());
    loop {
        let piece = choice.next().await.map_err(|e| (index, e))?;
        text += &piece.text;
        writers.extend(piece.entries.iter().map(|entry| entry.committed.model));
        if let Some(end) = piece.end {
            return Ok(Answered { index, text, writers, end, seconds: start.elapsed().as_secs_f64() });
        }
    }
}
