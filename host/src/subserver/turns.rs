//! Whose turn it is where one model runs at a time. Shared by the models' threads, without locks.
//!
//! All accesses are sequentially consistent, because each side first writes and then reads what the other
//! wrote: a model publishes its work before it looks at the turn, and the turn is passed before work is
//! looked for again. So one of the two always notices, and no turn is lost.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

const FREE: usize = usize::MAX;

/// What a model has to do.
#[derive(Debug, Default)]
struct Work {
    ready: AtomicUsize,
    /// Requests on their way to it.
    arriving: AtomicUsize,
    /// Its thread has ended.
    gone: AtomicBool,
}

/// The turn of the models of one server. Models are indices.
#[derive(Debug)]
pub struct Turns {
    holder: AtomicUsize,
    work: Vec<Work>,
    /// The turn is passed after each step, not only when nothing is ready any more.
    each_step: bool,
}

impl Turns {
    pub fn new(models: usize, each_step: bool) -> Self {
        Self { holder: AtomicUsize::new(FREE), work: (0..models).map(|_| Work::default()).collect(), each_step }
    }

    /// A request is about to be sent to `model`.
    pub fn sent(&self, model: usize) {
        self.work[model].arriving.fetch_add(1, SeqCst);
    }

    /// Whether `model` may run. `ready` requests are ready there, and `arrived` have arrived since the last
    /// call. Whoever must look now goes to `wakes`.
    pub fn look(&self, model: usize, ready: usize, arrived: usize, wakes: &mut Vec<usize>) -> bool {
        self.work[model].ready.store(ready, SeqCst);
        self.work[model].arriving.fetch_sub(arrived, SeqCst);
        if ready > 0 {
            return match self.holder.compare_exchange(FREE, model, SeqCst, SeqCst) {
                Ok(_) => true,
                Err(holder) => holder == model,
            };
        }
        // A turn is kept for what is under way.
        if self.holder.load(SeqCst) == model && !self.has_work(model) {
            self.pass(model, wakes);
        }
        false
    }

    /// `model` has made a step, which left `ready` requests there.
    pub fn stepped(&self, model: usize, ready: usize, wakes: &mut Vec<usize>) {
        self.work[model].ready.store(ready, SeqCst);
        // Without the turn it ran because it had waited too long.
        if self.each_step && self.holder.load(SeqCst) == model {
            self.pass(model, wakes);
        }
    }

    /// The thread of `model` has ended.
    pub fn bury(&self, model: usize, wakes: &mut Vec<usize>) {
        self.work[model].gone.store(true, SeqCst);
        if self.holder.load(SeqCst) == model {
            self.pass(model, wakes);
        }
    }

    fn has_work(&self, model: usize) -> bool {
        let work = &self.work[model];
        !work.gone.load(SeqCst) && work.ready.load(SeqCst) + work.arriving.load(SeqCst) > 0
    }

    /// Pass the turn of `from` to the next model with work.
    fn pass(&self, from: usize, wakes: &mut Vec<usize>) {
        let models = self.work.len();
        let after = |step: usize| (from + step) % models;
        loop {
            let Some(next) = (1..=models).map(after).find(|&model| self.has_work(model)) else {
                self.holder.store(FREE, SeqCst);
                wakes.extend((0..models).filter(|&model| self.has_work(model)));
                return;
            };
            self.holder.store(next, SeqCst);
            if !self.work[next].gone.load(SeqCst) {
                wakes.extend((next != from).then_some(next));
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether each of the models may run, with so many requests ready.
    fn look(turns: &Turns, model: usize, ready: usize, arrived: usize) -> (bool, Vec<usize>) {
        let mut wakes = Vec::new();
        (turns.look(model, ready, arrived, &mut wakes), wakes)
    }

    fn stepped(turns: &Turns, model: usize, ready: usize) -> Vec<usize> {
        let mut wakes = Vec::new();
        turns.stepped(model, ready, &mut wakes);
        wakes
    }

    #[test]
    fn a_model_runs_until_nothing_is_ready_there() {
        let turns = Turns::new(3, false);
        assert_eq!(look(&turns, 1, 2, 0), (true, vec![]));
        assert_eq!(look(&turns, 2, 1, 0), (false, vec![]));
        turns.sent(0);
        assert!(stepped(&turns, 1, 1).is_empty());
        assert_eq!(look(&turns, 1, 1, 0), (true, vec![]));
        turns.sent(0);
        assert!(stepped(&turns, 1, 0).is_empty());
        assert_eq!(look(&turns, 1, 0, 0), (false, vec![2]));
        // Model 0 has yet to see its requests; it is behind model 2.
        assert_eq!((look(&turns, 0, 1, 1), look(&turns, 2, 1, 0)), ((false, vec![]), (true, vec![])));
        assert!(stepped(&turns, 2, 0).is_empty());
        assert_eq!(look(&turns, 2, 0, 0), (false, vec![0]));
        // What is on its way keeps the turn.
        assert_eq!(look(&turns, 0, 0, 0), (false, vec![]));
        assert_eq!(look(&turns, 2, 4, 0), (false, vec![]));
        assert_eq!(look(&turns, 0, 1, 1), (true, vec![]));
        assert_eq!(look(&turns, 0, 0, 0), (false, vec![2]));
    }

    #[test]
    fn the_turn_goes_round_step_by_step() {
        let turns = Turns::new(2, true);
        assert!(look(&turns, 0, 3, 0).0);
        turns.sent(1);
        assert_eq!(stepped(&turns, 0, 2), [1]);
        assert!(!look(&turns, 0, 2, 0).0);
        assert!(look(&turns, 1, 1, 1).0);
        turns.sent(0);
        assert_eq!(stepped(&turns, 1, 0), [0]);
        assert!(look(&turns, 0, 3, 1).0);
        // Alone it goes on at once, and at the end the turn is free.
        assert!(stepped(&turns, 0, 3).is_empty());
        assert!(look(&turns, 0, 3, 0).0);
        assert!(stepped(&turns, 0, 0).is_empty());
        assert!(look(&turns, 1, 1, 0).0);
    }

    #[test]
    fn an_end_passes_the_turn_on() {
        let turns = Turns::new(2, false);
        assert!(look(&turns, 0, 1, 0).0);
        assert!(!look(&turns, 1, 1, 0).0);
        let mut wakes = Vec::new();
        turns.bury(0, &mut wakes);
        assert_eq!(wakes, [1]);
        turns.sent(0);
        assert!(look(&turns, 1, 1, 0).0);
        assert_eq!(look(&turns, 1, 0, 0), (false, vec![]));
        assert!(look(&turns, 1, 1, 0).0, "nobody waits for a model that is gone");
    }

    /// Threads that pass requests around: each request needs a number of steps, and all are made.
    #[test]
    fn no_turn_is_lost_between_threads() {
        use std::sync::mpsc;
        for each_step in [false, true] {
            let turns = &Turns::new(3, each_step);
            let (senders, inboxes): (Vec<_>, Vec<_>) = (0..3).map(|_| mpsc::channel::<Option<u32>>()).unzip();
            let (running, stop) = (&AtomicUsize::new(0), &AtomicBool::new(false));
            let all_ended = std::thread::scope(|scope| {
                let (done, ended) = mpsc::channel();
                for (model, inbox) in inboxes.into_iter().enumerate() {
                    let (senders, done) = (senders.clone(), done.clone());
                    scope.spawn(move || {
                        let wake = |wakes: &mut Vec<usize>| {
                            for model in wakes.drain(..) {
                                let _ = senders[model].send(None);
                            }
                        };
                        let (mut own, mut arrived, mut wakes) = (Vec::<u32>::new(), 0, Vec::new());
                        while let Ok(message) = inbox.recv() {
                            if stop.load(SeqCst) {
                                return;
                            }
                            for message in std::iter::once(message).chain(inbox.try_iter()) {
                                arrived += usize::from(message.is_some());
                                own.extend(message);
                            }
                            while turns.look(model, own.len(), std::mem::take(&mut arrived), &mut wakes) {
                                assert_eq!(running.fetch_add(1, SeqCst), 0, "two at a time");
                                for (i, left) in std::mem::take(&mut own).into_iter().enumerate() {
                                    match (left, (left as usize + i) % 3) {
                                        (0, _) => {
                                            let _ = done.send(());
                                        }
                                        (_, to) if to == model => own.push(left - 1),
                                        (_, to) => {
                                            turns.sent(to);
                                            let _ = senders[to].send(Some(left - 1));
                                        }
                                    }
                                }
                                running.fetch_sub(1, SeqCst);
                                turns.stepped(model, own.len(), &mut wakes);
                                wake(&mut wakes);
                            }
                            wake(&mut wakes);
                        }
                    });
                }
                for left in 0..60 {
                    turns.sent(0);
                    let _ = senders[0].send(Some(100 + left));
                }
                let wait = std::time::Duration::from_secs(60);
                let all_ended = (0..60).all(|_| ended.recv_timeout(wait).is_ok());
                stop.store(true, SeqCst);
                for sender in &senders {
                    let _ = sender.send(None);
                }
                all_ended
            });
            assert!(all_ended, "a request waits for ever");
        }
    }
}
