//! Which pages of a pool hold the K/V of which tokens: the index of the prefix cache, and the order in
//! which it gives pages up. Pure.
//!
//! A page is found by the page before it and by its own tokens, all of which are compared: the page
//! before it stands for everything further ahead. So a collision of hashes costs time and nothing else.
//! For that a page must stay as long as one that follows it does. It does, because a sequence holds all
//! pages ahead of one that it holds, and lets go of the last page first: among those that nobody
//! holds, a page has always been idle for longer than the one before it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::request::TokenId;
use crate::runner::{PAGE_TOKENS, PageId};

/// What keeps sequences apart that begin with the same tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Root {
    /// Of the client's choosing.
    pub salt: Option<Arc<str>>,
    /// With each page the runner keeps hidden states for nets that look back. It need not keep them for
    /// sequences without such a net.
    pub hidden: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Parent {
    Root(Root),
    Page(PageId),
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Key {
    parent: Parent,
    tokens: [TokenId; PAGE_TOKENS],
}

impl Key {
    /// `None` unless `tokens` fill a page.
    fn new(root: &Root, before: Option<PageId>, tokens: &[TokenId]) -> Option<Self> {
        let parent = before.map_or_else(|| Parent::Root(root.clone()), Parent::Page);
        Some(Self { parent, tokens: tokens.try_into().ok()? })
    }
}

/// A page as the cache knows it.
#[derive(Clone, Debug, Default)]
struct Slot {
    /// Sequences that hold it as a shared page.
    holders: u32,
    /// Where it is in the index.
    key: Option<Arc<Key>>,
    /// When the last holder let go.
    idle_since: u64,
}

/// Shared pages: those that sequences hold, and those that are kept in case one comes.
#[derive(Debug)]
pub struct Index {
    pages: HashMap<Arc<Key>, PageId>,
    /// By page.
    slots: Vec<Slot>,
    /// Pages that nobody holds, longest idle first.
    idle: BTreeMap<u64, PageId>,
    clock: u64,
    evictions: u64,
}

impl Index {
    /// For the pages `0..total`; none is shared.
    pub fn new(total: u32) -> Self {
        let slots = vec![Slot::default(); total as usize];
        Self { pages: HashMap::new(), slots, idle: BTreeMap::new(), clock: 0, evictions: 0 }
    }

    /// Pages that nobody holds.
    pub fn idle(&self) -> usize {
        self.idle.len()
    }

    /// Pages given up so far.
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Sequences that hold `page` as a shared one.
    pub fn holders(&self, page: PageId) -> u32 {
        self.slots[page as usize].holders
    }

    /// Hold the page with `tokens` behind the page `before`, or at the beginning, if there is one.
    pub fn hold(&mut self, root: &Root, before: Option<PageId>, tokens: &[TokenId]) -> Option<PageId> {
        let page = *self.pages.get(&Key::new(root, before, tokens)?)?;
        let slot = &mut self.slots[page as usize];
        if slot.holders == 0 {
            self.idle.remove(&slot.idle_since);
        }
        slot.holders += 1;
        Some(page)
    }

    /// Share `page`, which one sequence owns: it holds `tokens`, and no shared page does. False, and it
    /// stays as it is, when what is before it is not in the index any more.
    #[must_use]
    pub fn enter(&mut self, root: &Root, before: Option<PageId>, tokens: &[TokenId], page: PageId) -> bool {
        if before.is_some_and(|before| self.slots[before as usize].key.is_none()) {
            return false;
        }
        let Some(key) = Key::new(root, before, tokens).map(Arc::new) else { return false };
        self.pages.insert(key.clone(), page);
        self.slots[page as usize] = Slot { holders: 1, key: Some(key), idle_since: 0 };
        true
    }

    /// A holder lets go of `page`; a sequence lets go of its last page first. True when the page is free.
    #[must_use]
    pub fn release(&mut self, page: PageId) -> bool {
        let slot = &mut self.slots[page as usize];
        slot.holders = slot.holders.saturating_sub(1);
        if slot.holders > 0 || slot.key.is_none() {
            return slot.holders == 0;
        }
        self.clock += 1;
        slot.idle_since = self.clock;
        self.idle.insert(self.clock, page);
        false
    }

    /// Give up the page that has been idle the longest: it is free.
    pub fn evict(&mut self) -> Option<PageId> {
        let (_, page) = self.idle.pop_first()?;
        if let Some(key) = self.slots[page as usize].key.take() {
            self.pages.remove(&key);
        }
        self.evictions += 1;
        Some(page)
    }

    /// Find no page any more. Returns those that are free; the others are when their holders let go.
    pub fn clear(&mut self) -> Vec<PageId> {
        self.pages.clear();
        self.slots.iter_mut().for_each(|slot| slot.key = None);
        std::mem::take(&mut self.idle).into_values().collect()
    }
}
