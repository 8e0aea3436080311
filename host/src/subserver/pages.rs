//! The page pool of one model. Pages are owned: dropping [`Pages`] gives them back.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::runner::{PAGE_TOKENS, PageId};

#[derive(Debug)]
struct Shared {
    free: Mutex<Vec<PageId>>,
    in_use: AtomicUsize,
    total: usize,
}

impl Shared {
    /// The free list stays valid whatever a panicking holder did: every operation on it is one call.
    fn free(&self) -> MutexGuard<'_, Vec<PageId>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All pages of one model.
#[derive(Clone, Debug)]
pub struct PagePool(Arc<Shared>);

impl PagePool {
    /// A pool of the pages `0..total`.
    pub fn new(total: u32) -> Self {
        let free = (0..total).rev().collect();
        Self(Arc::new(Shared { free: Mutex::new(free), in_use: AtomicUsize::new(0), total: total as usize }))
    }

    /// Pages of the pool.
    pub fn total(&self) -> usize {
        self.0.total
    }

    /// Pages that nobody owns.
    pub fn available(&self) -> usize {
        self.0.total - self.in_use()
    }

    /// Pages that somebody owns.
    pub fn in_use(&self) -> usize {
        self.0.in_use.load(Ordering::Relaxed)
    }

    /// An owner of no page.
    pub fn pages(&self) -> Pages {
        Pages { pool: self.clone(), ids: Vec::new() }
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
    ids: Vec<PageId>,
}

impl Pages {
    /// The pages' ids, first position first.
    pub fn ids(&self) -> &[PageId] {
        &self.ids
    }

    /// Own at least `count` pages. False, and nothing changes, when the pool has too few.
    #[must_use]
    pub fn grow_to(&mut self, count: usize) -> bool {
        let Some(more @ 1..) = count.checked_sub(self.ids.len()) else { return true };
        let mut free = self.pool.0.free();
        if free.len() < more {
            return false;
        }
        let at = free.len() - more;
        self.ids.extend(free.drain(at..).rev());
        self.pool.0.in_use.fetch_add(more, Ordering::Relaxed);
        true
    }

    /// Give back all pages behind the first `count`.
    pub fn shrink_to(&mut self, count: usize) {
        if count < self.ids.len() {
            let mut free = self.pool.0.free();
            self.pool.0.in_use.fetch_sub(self.ids.len() - count, Ordering::Relaxed);
            free.extend(self.ids.drain(count..).rev());
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

    #[test]
    fn pages_come_back() {
        let pool = PagePool::new(3);
        let (mut a, mut b) = (pool.pages(), pool.pages());
        assert!(a.grow_to(2) && !b.grow_to(2) && b.grow_to(1));
        assert_eq!((a.ids(), b.ids(), pool.available()), (&[0, 1][..], &[2][..], 0));
        a.shrink_to(1);
        assert!(b.grow_to(2));
        assert_eq!(b.ids(), [2, 1]);
        drop((a, b));
        assert_eq!((pool.in_use(), pool.available()), (0, 3));
        let mut all = pool.pages();
        assert!(all.grow_to(3));
        let mut ids = all.ids().to_vec();
        ids.sort_unstable();
        assert_eq!(ids, [0, 1, 2]);
    }

    #[test]
    fn rounding() {
        assert_eq!([0, 1, 16, 17].map(pages_for), [0, 1, 1, 2]);
    }
}
