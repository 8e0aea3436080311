//! Answers under way by name, so that they can be aborted.

use std::collections::{HashMap, HashSet};
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

    /// Abort what has one of the names. Tells how many answers that are; one with several of the names is one.
    pub fn abort(&self, names: &[String]) -> usize {
        let table = self.table();
        abort(names.iter().filter_map(|name| table.named.get(name)).flatten())
    }

    /// Abort everything. Tells how many answers there are.
    pub fn abort_all(&self) -> usize {
        abort(self.table().named.values().flatten())
    }
}

fn abort<'a>(entries: impl Iterator<Item = &'a Entry>) -> usize {
    let told = entries.map(|(number, abort)| {
        abort.send_replace(true);
        *number
    });
    told.collect::<HashSet<u64>>().len()
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
        let abort = |names: &[&str]| running.abort(&names.iter().map(|name| (*name).into()).collect::<Vec<_>>());
        assert_eq!((abort(&["b"]), abort(&["c"])), (1, 0));
        assert_eq!((*aborted.borrow(), *other.borrow()), (true, false));
        // Each of both once, under whatever names.
        assert_eq!((abort(&["b", "b", "c"]), abort(&["a", "b", "a"])), (1, 2));
        assert!(*other.borrow());
        drop(first);
        assert_eq!(abort(&["b"]), 0);
        assert_eq!(running.abort_all(), 1);
        drop(second);
        assert!(running.table().named.is_empty());
    }
}
