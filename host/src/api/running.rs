//! Answers under way by name, so that they can be aborted.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// All that can be aborted.
#[derive(Clone, Debug, Default)]
pub struct Running(Arc<Mutex<Table>>);

/// An answer's number, and what tells it to end.
type Entry = (u64, Arc<watch::Sender<bool>>);

#[derive(Debug, Default)]
struct Table {
    /// Names are the clients' own, so several answers may have one.
    named: HashMap<String, Vec<Entry>>,
    next: u64,
}

/// An answer that can be aborted, until dropped.
#[derive(Debug)]
pub struct Named {
    running: Running,
    names: Vec<String>,
    number: u64,
}

impl Running {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enter an answer under its names. The receiver is told when it is aborted.
    pub fn enter(&self, names: Vec<String>) -> (Named, watch::Receiver<bool>) {
        let (abort, aborted) = watch::channel(false);
        let abort = Arc::new(abort);
        let mut table = self.table();
        let number = table.next;
        table.next += 1;
        for name in &names {
            table.named.entry(name.clone()).or_default().push((number, abort.clone()));
        }
        drop(table);
        (Named { running: self.clone(), names, number }, aborted)
    }

    /// Abort what has the name. Tells whether anything has it.
    pub fn abort(&self, name: &str) -> bool {
        let table = self.table();
        let named = table.named.get(name);
        for (_, abort) in named.into_iter().flatten() {
            abort.send_replace(true);
        }
        named.is_some()
    }

    /// Abort everything. Tells how many answers there are.
    pub fn abort_all(&self) -> usize {
        let table = self.table();
        let mut numbers: Vec<u64> = Vec::new();
        for (number, abort) in table.named.values().flatten() {
            abort.send_replace(true);
            numbers.push(*number);
        }
        numbers.sort_unstable();
        numbers.dedup();
        numbers.len()
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let mut table = self.running.table();
        for name in &self.names {
            if let Some(named) = table.named.get_mut(name) {
                named.retain(|(number, _)| *number != self.number);
                if named.is_empty() {
                    table.named.remove(name);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_forgotten_with_their_answers() {
        let running = Running::default();
        let (first, aborted) = running.enter(vec!["a".into(), "b".into()]);
        let (second, other) = running.enter(vec!["a".into()]);
        assert!(running.abort("b") && !running.abort("c"));
        assert_eq!((*aborted.borrow(), *other.borrow()), (true, false));
        drop(first);
        assert!(!running.abort("b"));
        assert_eq!(running.abort_all(), 1);
        assert!(*other.borrow());
        drop(second);
        assert!(running.table().named.is_empty());
    }
}
