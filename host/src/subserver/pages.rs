//! The page pool of one model. Pages are owned: dropping [`Pages`] gives them back.
//!
//! The first pages of a sequence may be shared: other sequences that begin with the same tokens hold
//! them as well, and nobody writes to them. The pages behind them are its own.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::prefix::{Index, Root};
use crate::request::TokenId;
use crate::runner::{PAGE_TOKENS, PageId};

/// Every page is free, or idle in the index, or in use: as the own page of one sequence, or as a shared
/// one of some.
#[derive(Debug)]
struct State {
    free: Vec<PageId>,
    index: Index,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    total: usize,
}

/// All pages of one model.
#[derive(Clone, Debug)]
pub struct PagePool(Arc<Shared>);

impl PagePool {
    /// A pool of the pages `0..total`.
    pub fn new(total: u32) -> Self {
        let state = State { free: (0..total).rev().collect(), index: Index::new(total) };
        Self(Arc::new(Shared { state: Mutex::new(state), total: total as usize }))
    }

    /// The state is whole between any two calls, so a panic elsewhere cannot spoil it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pages of the pool.
    pub fn total(&self) -> usize {
        self.0.total
    }

    /// Pages that no sequence holds: free ones, and cached ones, which are given up when needed.
    pub fn available(&self) -> usize {
        let state = self.state();
        state.free.len() + state.index.idle()
    }

    /// Pages that sequences hold; a shared one counts once.
    pub fn in_use(&self) -> usize {
        self.0.total - self.available()
    }

    /// Pages that no sequence holds, kept for one that begins with their tokens.
    pub fn cached(&self) -> usize {
        self.state().index.idle()
    }

    /// Cached pages given up so far because others were needed.
    pub fn evictions(&self) -> u64 {
        self.state().index.evictions()
    }

    /// Share no page any more that is shared or cached now: what they hold may be damaged.
    pub fn forget_cached(&self) {
        let mut state = self.state();
        let free = state.index.clear();
        state.free.extend(free);
    }

    /// An owner of no page. Its pages are shared with sequences of the same root; with none, if there is none.
    pub fn pages(&self, root: Option<Root>) -> Pages {
        Pages { pool: self.clone(), root, ids: Vec::new(), shared: 0 }
    }

    /// How many pages come free by giving back all of each of `order`, one after the other.
    pub fn freed<'a>(&self, order: impl Iterator<Item = &'a Pages>) -> Vec<usize> {
        let state = self.state();
        let mut left: HashMap<PageId, u32> = HashMap::new();
        let mut last_holder = |page: &PageId| {
            let left = left.entry(*page).or_insert_with(|| state.index.holders(*page));
            *left = left.saturating_sub(1);
            *left == 0
        };
        let freed = |pages: &Pages| {
            let shared = pages.ids[..pages.shared].iter().filter(|page| last_holder(page)).count();
            pages.ids.len() - pages.shared + shared
        };
        order.map(freed).collect()
    }
}

/// Pages needed for `tokens` tokens.
pub fn pages_for(tokens: usize) -> usize {
    tokens.div_ceil(PAGE_TOKENS)
}

/// The pages of one sequence, in order.
#[derive(Debug)]
pub struct Pages {
    pool: PagePool,
    root: Option<Root>,
    ids: Vec<PageId>,
    /// How many of `ids`, from the first on, are shared.
    shared: usize,
}

impl Pages {
    /// The pages' ids, first position first.
    pub fn ids(&self) -> &[PageId] {
        &self.ids
    }

    /// How many pages, from the first on, are shared: they are full and must not be written to.
    pub fn shared(&self) -> usize {
        self.shared
    }

    /// Whether a sequence may share pages at all.
    pub fn can_share(&self) -> bool {
        self.root.is_some()
    }

    /// Own at least `count` pages. False, and nothing changes, when the pool has too few.
    #[must_use]
    pub fn grow_to(&mut self, count: usize) -> bool {
        let Some(more @ 1..) = count.checked_sub(self.ids.len()) else { return true };
        let State { free, index } = &mut *self.pool.state();
        if free.len() + index.idle() < more {
            return false;
        }
        self.ids.extend((0..more).map_while(|_| free.pop().or_else(|| index.evict())));
        true
    }

    /// Give back all pages behind the first `count`.
    pub fn shrink_to(&mut self, count: usize) {
        if count >= self.ids.len() {
            return;
        }
        let State { free, index } = &mut *self.pool.state();
        for at in (count..self.ids.len()).rev() {
            let page = self.ids[at];
            if at >= self.shared || index.release(page) {
                free.push(page);
            }
        }
        self.ids.truncate(count);
        self.shared = self.shared.min(count);
    }

    /// Share further pages of a sequence that begins with `tokens`, of which it has the K/V of the first
    /// `computed`: take those that are in the cache, and put its own ones there.
    pub fn share(&mut self, tokens: &[TokenId], computed: usize) {
        let Some(root) = &self.root else { return };
        let State { free, index } = &mut *self.pool.state();
        for tokens in tokens.chunks_exact(PAGE_TOKENS).skip(self.shared) {
            let before = self.shared.checked_sub(1).map(|last| self.ids[last]);
            let own = self.ids.get_mut(self.shared);
            match (index.hold(root, before, tokens), own) {
                (Some(page), Some(own)) => free.push(std::mem::replace(own, page)),
                (Some(page), None) => self.ids.push(page),
                (None, Some(own)) if (self.shared + 1) * PAGE_TOKENS <= computed => {
                    if !index.enter(root, before, tokens, *own) {
                        return;
                    }
                }
                (None, _) => return,
            }
            self.shared += 1;
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tokens(text: impl IntoIterator<Item = u32>) -> Vec<TokenId> {
        text.into_iter().flat_map(|token| [token; PAGE_TOKENS]).collect()
    }

    fn cached(pool: &PagePool) -> Pages {
        pool.pages(Some(Root::default()))
    }

    /// A sequence with the K/V of all its tokens; pages in the cache are taken from there.
    fn computed(pool: &PagePool, text: &[u32]) -> Pages {
        let (mut pages, tokens) = (cached(pool), tokens(text.iter().copied()));
        pages.share(&tokens, 0);
        assert!(pages.grow_to(text.len()));
        pages.share(&tokens, tokens.len());
        pages
    }

    #[test]
    fn pages_come_back() {
        let pool = PagePool::new(3);
        let (mut a, mut b) = (pool.pages(None), pool.pages(None));
        assert!(a.grow_to(2) && !b.grow_to(2) && b.grow_to(1));
        assert_eq!((a.ids(), b.ids(), pool.available()), (&[0, 1][..], &[2][..], 0));
        a.shrink_to(1);
        assert!(b.grow_to(2));
        assert_eq!(b.ids(), [2, 1]);
        drop((a, b));
        assert_eq!((pool.in_use(), pool.available()), (0, 3));
        let mut all = pool.pages(None);
        assert!(all.grow_to(3));
        let mut ids = all.ids().to_vec();
        ids.sort_unstable();
        assert_eq!(ids, [0, 1, 2]);
    }

    #[test]
    fn rounding() {
        assert_eq!([0, 1, 16, 17].map(pages_for), [0, 1, 1, 2]);
    }

    #[test]
    fn a_prefix_is_shared_and_outlives_its_sequences() {
        let pool = PagePool::new(8);
        let a = computed(&pool, &[1, 2, 3]);
        let mut b = computed(&pool, &[1, 2, 4]);
        assert_eq!((&b.ids()[..2], b.shared(), pool.in_use()), (&a.ids()[..2], 3, 4));
        // The same tokens behind others are other pages.
        let c = computed(&pool, &[2]);
        assert!(!a.ids().contains(&c.ids()[0]));
        assert_eq!(pool.freed([&a, &b, &c].into_iter()), [1, 3, 1]);
        assert_eq!(pool.freed([&b, &a].into_iter()), [1, 3]);
        let ids = b.ids().to_vec();
        b.shrink_to(1);
        assert_eq!((b.shared(), pool.in_use(), pool.cached()), (1, 4, 1));
        drop((a, b, c));
        assert_eq!((pool.in_use(), pool.cached(), pool.available()), (0, 5, 8));
        assert_eq!(computed(&pool, &[1, 2, 4]).ids(), ids);
    }

    #[test]
    fn who_computed_the_same_at_the_same_time_takes_over_the_first_pages() {
        let pool = PagePool::new(4);
        let text = tokens([5, 6]);
        let (mut a, mut b) = (cached(&pool), cached(&pool));
        assert!(a.grow_to(2) && b.grow_to(2));
        a.share(&text, text.len());
        // Of its second page b has 15 tokens only.
        b.share(&text[..31], 31);
        assert_eq!((a.ids(), b.ids(), b.shared(), pool.in_use()), (&[0, 1][..], &[0, 3][..], 1, 3));
        b.share(&text, 31);
        assert_eq!((b.ids(), b.shared(), pool.in_use()), (&[0, 1][..], 2, 2));
    }

    #[test]
    fn roots_keep_sequences_apart() {
        let pool = PagePool::new(8);
        let salted = Root { salt: Some("a".into()), hidden: false };
        let roots = [Some(Root::default()), Some(salted), Some(Root { salt: None, hidden: true }), None];
        let (text, mut all) = (tokens([7]), Vec::new());
        for root in &roots {
            let mut pages = pool.pages(root.clone());
            assert!(pages.grow_to(1));
            pages.share(&text, text.len());
            assert_eq!((pages.ids(), pages.shared()), (&[all.len() as u32][..], usize::from(root.is_some())));
            all.push(pages);
        }
    }

    #[test]
    fn the_longest_idle_goes_first_and_the_end_of_a_sequence_before_its_beginning() {
        let pool = PagePool::new(4);
        let a = computed(&pool, &[1, 2]).ids().to_vec();
        let b = computed(&pool, &[3]).ids().to_vec();
        drop(computed(&pool, &[1]));
        let mut own = pool.pages(None);
        assert!(own.grow_to(2));
        assert_eq!((own.ids()[1], pool.cached(), pool.evictions()), (a[1], 2, 1));
        assert!(own.grow_to(3));
        assert_eq!((own.ids()[2], pool.evictions()), (b[0], 2));
        assert!(!own.grow_to(5) && own.grow_to(4));
        assert_eq!((own.ids()[3], pool.cached()), (a[0], 0));
    }

    #[test]
    fn nothing_is_found_after_it_was_forgotten() {
        let pool = PagePool::new(8);
        let mut a = computed(&pool, &[1, 2]);
        drop(computed(&pool, &[3]));
        pool.forget_cached();
        assert_eq!((pool.in_use(), pool.cached()), (2, 0));
        // What follows a forgotten page cannot be found either.
        assert!(a.grow_to(3));
        a.share(&tokens([1, 2, 9]), 48);
        assert_eq!(a.shared(), 2);
        let b = computed(&pool, &[1, 2, 9]);
        assert!(b.ids().iter().all(|id| !a.ids().contains(id)));
        drop(a);
        assert_eq!((pool.in_use(), pool.cached(), pool.available()), (3, 0, 5));
    }

    proptest! {
        /// Sequences over two different pages of text come and go. Each page they take from the cache must
        /// hold what they would have computed.
        #[test]
        fn a_page_holds_what_it_is_found_by(
            total in 1u32..12,
            steps in prop::collection::vec((0usize..4, prop::collection::vec(1u32..3, 0..6), any::<bool>()), 1..60),
        ) {
            let pool = PagePool::new(total);
            // What each page holds: all tokens up to its end.
            let mut holds: HashMap<PageId, Vec<u32>> = HashMap::new();
            let mut live: Vec<Pages> = (0..4).map(|_| cached(&pool)).collect();
            for (who, text, all) in steps {
                let tokens = tokens(text.iter().copied());
                live[who] = cached(&pool);
                let pages = &mut live[who];
                pages.share(&tokens, 0);
                for (at, id) in pages.ids().iter().enumerate() {
                    prop_assert_eq!(&holds[id], &text[..=at]);
                }
                let first = pages.shared();
                if pages.grow_to(text.len()) {
                    for at in first..text.len() {
                        holds.insert(pages.ids()[at], text[..=at].to_vec());
                    }
                    pages.share(&tokens, if all { tokens.len() } else { tokens.len() / 2 });
                }
                let mut held: Vec<PageId> = live.iter().flat_map(|pages| pages.ids().iter().copied()).collect();
                held.sort_unstable();
                held.dedup();
                prop_assert_eq!(held.len(), pool.in_use());
                prop_assert!(pool.available() + pool.in_use() == total as usize);
                let freed: usize = pool.freed(live.iter()).iter().sum();
                prop_assert_eq!(freed, pool.in_use());
            }
            live.clear();
            prop_assert_eq!(pool.in_use(), 0);
        }
    }
}
