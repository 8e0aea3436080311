//! A load: sessions that begin at their moments, at most so many at once.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::arrivals;
use super::ask::{Answer, Ask, Prompt, Until};
use super::target::Target;

/// How often the progress is told.
const TICK: Duration = Duration::from_millis(200);

/// What decides when sessions begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pace {
    /// So many are always under way.
    Closed { requests: u32 },
    /// So many a second arrive, as [`arrivals::moments`] has them; at most `most` are under way.
    Open { rate: f64, burstiness: f64, most: Option<u32> },
}

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed { requests } => write!(f, "{requests}"),
            Self::Open { rate, .. } => write!(f, "{rate}/s"),
        }
    }
}

/// What is asked, and when.
#[derive(Clone, Debug)]
pub struct Load {
    /// Turns of each.
    pub sessions: Vec<Vec<Ask>>,
    /// When each is to begin, from the start of the load, ascending. All zero: a closed load, in which a
    /// session begins when another ends.
    pub moments: Vec<Duration>,
    /// Sessions under way at once; at least 1.
    pub most: usize,
    /// Then nothing more begins, and what is under way is broken off.
    pub longest: Option<Duration>,
}

/// A load that is over.
#[derive(Clone, Debug)]
pub struct Carried {
    pub began: Instant,
    /// In the order of sessions and turns.
    pub answers: Vec<Answer>,
}

/// The task of a session panicked (the log says how).
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("a session of the load panicked")]
pub struct Panicked;

impl Load {
    /// `seed`: of the moments.
    pub fn new(pace: Pace, sessions: Vec<Vec<Ask>>, seed: u64) -> Self {
        let count = sessions.len();
        let (moments, most) = match pace {
            Pace::Closed { requests } => (vec![Duration::ZERO; count], requests as usize),
            Pace::Open { rate, burstiness, most } => {
                (arrivals::moments(count, rate, burstiness, seed), most.map_or(usize::MAX, |most| most as usize))
            }
        };
        Self { sessions, moments, most: most.max(1), longest: None }
    }

    /// Tokens of all answers, if none fails.
    pub fn tokens(&self) -> u64 {
        self.sessions.iter().flatten().map(|ask| u64::from(ask.output_len)).sum()
    }

    /// Put the load on `target`. `progress` is told the number of tokens so far.
    pub async fn run(self, target: &Arc<Target>, mut progress: impl FnMut(u64)) -> Result<Carried, Panicked> {
        let told = Arc::new(AtomicU64::new(0));
        let mut under_way = JoinSet::new();
        let mut answers: Vec<Answer> = Vec::with_capacity(self.sessions.iter().map(Vec::len).sum());
        let mut ticks = tokio::time::interval(TICK);
        let began = Instant::now();
        let until = Until(self.longest.map(|longest| began + longest));
        let mut next = self.moments.iter().map(|moment| began + *moment).zip(self.sessions).enumerate().peekable();
        loop {
            let over = until.over();
            while !over
                && under_way.len() < self.most
                && let Some((number, (due, turns))) = next.next_if(|(_, (due, _))| *due <= Instant::now())
            {
                under_way.spawn(session(target.clone(), number, turns, due, told.clone(), until));
            }
            let due = next.peek().filter(|_| !over && under_way.len() < self.most).map(|(_, (due, _))| *due);
            let due = due.map(|due| until.0.map_or(due, |until| due.min(until)));
            if under_way.is_empty() && due.is_none() {
                break;
            }
            tokio::select! {
                Some(ended) = under_way.join_next() => answers.extend(ended.map_err(|_| Panicked)?),
                () = tokio::time::sleep_until(due.unwrap_or(began).into()), if due.is_some() => {}
                _ = ticks.tick() => progress(told.load(Ordering::Relaxed)),
            }
        }
        answers.sort_by_key(|answer| (answer.session, answer.turn));
        Ok(Carried { began, answers })
    }
}

async fn session(
    target: Arc<Target>,
    number: usize,
    turns: Vec<Ask>,
    due: Instant,
    told: Arc<AtomicU64>,
    until: Until,
) -> Vec<Answer> {
    let mut answers = Vec::with_capacity(turns.len());
    let mut said = None;
    let mut failure: Option<String> = None;
    for (turn, mut ask) in turns.into_iter().enumerate() {
        // A later turn follows at once.
        let due = if turn == 0 { due } else { Instant::now() };
        let mut answer = match &failure {
            Some(failure) => Answer::new(due).failed(format!("an earlier turn of the session failed: {failure}")),
            None => {
                if let Some((prompt, reply)) = said.take() {
                    ask.prompt = Prompt::followed(prompt, reply, ask.prompt);
                }
                let (answer, reply) = target.answer(&ask, &told, until).await;
                failure.clone_from(&answer.failure);
                said = Some((ask.prompt, reply));
                answer
            }
        };
        (answer.session, answer.turn, answer.due) = (number, turn, due);
        let cut = answer.cut;
        answers.push(answer);
        if cut {
            break;
        }
    }
    answers
}
