//! Grammars kept for later requests: those used last, within bounds. Pure.

use std::collections::HashMap;
use std::hash::Hash;

/// Values by key, each with the memory that it takes.
#[derive(Debug)]
pub struct Kept<K, V> {
    /// With its bytes, and when it was used last.
    entries: HashMap<K, (V, usize, u64)>,
    most: usize,
    most_bytes: usize,
    bytes: usize,
    uses: u64,
}

impl<K: Clone + Eq + Hash, V: Clone> Kept<K, V> {
    /// At most `most` values of `most_bytes` bytes together.
    pub fn new(most: usize, most_bytes: usize) -> Self {
        Self { entries: HashMap::new(), most, most_bytes, bytes: 0, uses: 0 }
    }

    pub fn get(&mut self, key: &K) -> Option<V> {
        self.uses += 1;
        let (value, _, used) = self.entries.get_mut(key)?;
        *used = self.uses;
        Some(value.clone())
    }

    /// Keep `value`, unless it is too large by itself, in the place of those used longest ago.
    pub fn keep(&mut self, key: K, value: V, bytes: usize) {
        if bytes > self.most_bytes {
            return;
        }
        self.uses += 1;
        self.bytes += bytes;
        if let Some((_, before, _)) = self.entries.insert(key, (value, bytes, self.uses)) {
            self.bytes -= before;
        }
        while self.entries.len() > self.most || self.bytes > self.most_bytes {
            let oldest = self.entries.iter().min_by_key(|(_, (.., used))| *used).map(|(key, _)| key.clone());
            let Some((_, bytes, _)) = oldest.and_then(|key| self.entries.remove(&key)) else { return };
            self.bytes -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(kept: &Kept<u32, ()>) -> Vec<u32> {
        let mut keys: Vec<u32> = kept.entries.keys().copied().collect();
        keys.sort_unstable();
        keys
    }

    #[test]
    fn those_used_last_stay() {
        let mut kept = Kept::new(3, 100);
        for key in [1, 2, 3] {
            kept.keep(key, (), 10);
        }
        assert!(kept.get(&1).is_some());
        kept.keep(4, (), 10);
        assert_eq!((keys(&kept), kept.bytes), (vec![1, 3, 4], 30), "too many");
        kept.keep(5, (), 75);
        assert_eq!((keys(&kept), kept.bytes), (vec![1, 4, 5], 95));
        kept.keep(6, (), 25);
        assert_eq!((keys(&kept), kept.bytes), (vec![5, 6], 100), "too many bytes");
        kept.keep(7, (), 101);
        assert_eq!((keys(&kept), kept.bytes), (vec![5, 6], 100), "too large by itself");
        kept.keep(5, (), 5);
        assert_eq!((keys(&kept), kept.bytes), (vec![5, 6], 30), "the same again");
    }
}
