//! Numbers for packed states, in the order in which they were first seen.

/// Keys that differ in these low bits only have neighbouring slots.
const NEAR: u32 = 5;
const EMPTY: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Slot {
    key: u64,
    number: u32,
}

/// An open-addressed table, at most half full.
pub(super) struct Numbers {
    keys: Vec<u64>,
    slots: Vec<Slot>,
}

impl Default for Numbers {
    fn default() -> Self {
        Self { keys: Vec::new(), slots: vec![Slot { key: 0, number: EMPTY }; 64] }
    }
}

impl Numbers {
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn key(&self, number: usize) -> Option<u64> {
        self.keys.get(number).copied()
    }

    /// The number of `key`; the next one if it is new.
    pub fn number(&mut self, key: u64) -> u32 {
        let slot = self.find(key);
        if self.slots[slot].number != EMPTY {
            return self.slots[slot].number;
        }
        let number = self.keys.len() as u32;
        self.slots[slot] = Slot { key, number };
        self.keys.push(key);
        if 2 * self.keys.len() > self.slots.len() {
            self.slots = vec![Slot { key: 0, number: EMPTY }; 2 * self.slots.len()];
            for number in 0..self.keys.len() {
                let key = self.keys[number];
                let slot = self.find(key);
                self.slots[slot] = Slot { key, number: number as u32 };
            }
        }
        number
    }

    /// The slot of `key`, or the empty one for it.
    fn find(&self, key: u64) -> usize {
        let mask = self.slots.len() - 1;
        let mixed = (key >> NEAR).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let near = (key & ((1 << NEAR) - 1)) as usize;
        let mut slot = ((mixed ^ (mixed >> 32)) as usize).wrapping_add(near) & mask;
        while self.slots[slot].number != EMPTY && self.slots[slot].key != key {
            slot = (slot + 1) & mask;
        }
        slot
    }
}
