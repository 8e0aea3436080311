//! Who is answered next when not all can be: clients take turns, and each one's requests keep their order. Pure.

use std::collections::{HashMap, VecDeque};

use super::client::Client;

/// How much is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Answers under way at once, at least 1.
    pub running: usize,
    /// Requests that wait.
    pub queued_requests: usize,
    /// Prompt tokens of requests that wait.
    pub queued_tokens: Option<usize>,
    /// Answers of one client, under way and waiting.
    pub per_client: Option<usize>,
}

/// What one request takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// From 1 to [`Room::running`].
    pub answers: usize,
    pub prompt_tokens: usize,
}

/// Why a request is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// The client has this many answers.
    Client(usize),
    Requests(usize),
    Tokens(usize),
}

/// A place in the line.
pub type Ticket = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    Now,
    /// Until [`Line::leave`] or [`Line::give_up`] calls this ticket.
    Later(Ticket),
}

#[derive(Debug, Default)]
struct Account {
    /// Answers under way and waiting.
    answers: usize,
    waiting: VecDeque<(Ticket, Load)>,
}

/// A client is in `turns` once if it has requests that wait, else not at all. Whoever is first there is not
/// overtaken, however much it asks for, so everyone is called as long as answers end.
#[derive(Debug)]
pub struct Line {
    room: Room,
    running: usize,
    queued_requests: usize,
    queued_tokens: usize,
    accounts: HashMap<Client, Account>,
    turns: VecDeque<Client>,
    next: Ticket,
}

impl Line {
    pub fn new(room: Room) -> Self {
        Self {
            room,
            running: 0,
            queued_requests: 0,
            queued_tokens: 0,
            accounts: HashMap::new(),
            turns: VecDeque::new(),
            next: 0,
        }
    }

    pub fn waiting(&self) -> usize {
        self.queued_requests
    }

    pub fn arrive(&mut self, client: &Client, load: Load) -> Result<Arrival, Full> {
        let room = self.room;
        let has = self.accounts.get(client).map_or(0, |account| account.answers);
        if room.per_client.is_some_and(|most| has + load.answers > most) {
            return Err(Full::Client(has));
        }
        let at_once = self.turns.is_empty() && self.running + load.answers <= room.running;
        if !at_once {
            if self.queued_requests >= room.queued_requests {
                return Err(Full::Requests(self.queued_requests));
            }
            // One that is larger than the limit by itself may wait alone.
            let tokens = self.queued_tokens + load.prompt_tokens;
            if self.queued_requests > 0 && room.queued_tokens.is_some_and(|most| tokens > most) {
                return Err(Full::Tokens(self.queued_tokens));
            }
        }
        let account = self.accounts.entry(client.clone()).or_default();
        account.answers += load.answers;
        if at_once {
            self.running += load.answers;
            return Ok(Arrival::Now);
        }
        let ticket = self.next;
        self.next += 1;
        self.queued_requests += 1;
        self.queued_tokens += load.prompt_tokens;
        if account.waiting.is_empty() {
            self.turns.push_back(client.clone());
        }
        account.waiting.push_back((ticket, load));
        Ok(Arrival::Later(ticket))
    }

    /// `answers` of the client have ended. Returns who is called.
    pub fn leave(&mut self, client: &Client, answers: usize) -> Vec<Ticket> {
        self.running -= answers;
        self.settle(client, answers);
        self.call()
    }

    /// One that waits does so no longer. Returns who is called, as it may have kept others out.
    pub fn give_up(&mut self, client: &Client, ticket: Ticket) -> Vec<Ticket> {
        let Some(account) = self.accounts.get_mut(client) else { return Vec::new() };
        let Some(place) = account.waiting.iter().position(|(waits, _)| *waits == ticket) else { return Vec::new() };
        let Some((_, load)) = account.waiting.remove(place) else { return Vec::new() };
        if account.waiting.is_empty() {
            self.turns.retain(|waits| waits != client);
        }
        self.queued_requests -= 1;
        self.queued_tokens -= load.prompt_tokens;
        self.settle(client, load.answers);
        self.call()
    }

    fn settle(&mut self, client: &Client, answers: usize) {
        if let Some(account) = self.accounts.get_mut(client) {
            account.answers -= answers;
            if account.answers == 0 {
                self.accounts.remove(client);
            }
        }
    }

    fn call(&mut self) -> Vec<Ticket> {
        let mut called = Vec::new();
        while let Some(client) = self.turns.front() {
            let Some(account) = self.accounts.get_mut(client) else { break };
            let Some((ticket, load)) = account.waiting.front().copied() else { break };
            if self.running + load.answers > self.room.running {
                break;
            }
            account.waiting.pop_front();
            let more = !account.waiting.is_empty();
            if let Some(client) = self.turns.pop_front()
                && more
            {
                self.turns.push_back(client);
            }
            self.running += load.answers;
            self.queued_requests -= 1;
            self.queued_tokens -= load.prompt_tokens;
            called.push(ticket);
        }
        called
    }
}

#[cfg(test)]
#[path = "line_tests.rs"]
mod tests;
