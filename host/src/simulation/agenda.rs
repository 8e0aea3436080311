//! What is to happen, in the order of time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// Things that are to happen; those of one moment in the order in which they were entered.
#[derive(Debug)]
pub struct Agenda<T> {
    /// Moment, number of the entry, and its place in `things`.
    order: BinaryHeap<Reverse<(Duration, u64, usize)>>,
    things: Vec<Option<T>>,
    free: Vec<usize>,
    entered: u64,
}

impl<T> Default for Agenda<T> {
    fn default() -> Self {
        Self { order: BinaryHeap::new(), things: Vec::new(), free: Vec::new(), entered: 0 }
    }
}

impl<T> Agenda<T> {
    pub fn enter(&mut self, at: Duration, thing: T) {
        let place = self.free.pop().unwrap_or(self.things.len());
        match self.things.get_mut(place) {
            Some(free) => *free = Some(thing),
            None => self.things.push(Some(thing)),
        }
        self.order.push(Reverse((at, self.entered, place)));
        self.entered += 1;
    }

    /// The moment of the next thing.
    pub fn next(&self) -> Option<Duration> {
        self.order.peek().map(|Reverse((at, ..))| *at)
    }

    pub fn pop(&mut self) -> Option<T> {
        let Reverse((.., place)) = self.order.pop()?;
        self.free.push(place);
        self.things[place].take()
    }

    /// Everything that is to happen, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.things.iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_the_order_of_time_and_entry() {
        let ms = Duration::from_millis;
        let mut agenda = Agenda::default();
        for (at, thing) in [(5, 'a'), (3, 'b'), (5, 'c')] {
            agenda.enter(ms(at), thing);
        }
        assert_eq!((agenda.next(), agenda.pop(), agenda.pop()), (Some(ms(3)), Some('b'), Some('a')));
        agenda.enter(ms(5), 'd');
        assert_eq!(agenda.iter().count(), 2);
        assert_eq!([(); 3].map(|()| agenda.pop()), [Some('c'), Some('d'), None]);
    }
}
