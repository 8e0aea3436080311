//! Which fields the readers ask for, so that tests can hold the interface's document against them.

use std::cell::RefCell;
use std::collections::BTreeSet;

thread_local! {
    static NAMES: RefCell<BTreeSet<String>> = const { RefCell::new(BTreeSet::new()) };
}

/// A field was asked for.
pub fn note(name: &str) {
    NAMES.with_borrow_mut(|names| names.insert(name.to_owned()));
}

/// All that were asked for on this thread since the last call.
pub fn take() -> BTreeSet<String> {
    NAMES.take()
}
