//! State that a policy keeps for each request.

use crate::Slot;

/// One `T` for each live request of a policy instance, by slot.
///
/// A slot is reused after [`Policy::finished`](crate::Policy::finished): call [`PerRequest::forget`]
/// there, or one request's state becomes the next one's.
#[derive(Clone, Debug, Default)]
pub struct PerRequest<T>(Vec<T>);

impl<T: Default> PerRequest<T> {
    /// No state.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// The state at `slot`; the default for a new request.
    pub fn get(&mut self, slot: Slot) -> &mut T {
        let slot = slot as usize;
        if self.0.len() <= slot {
            self.0.resize_with(slot + 1, T::default);
        }
        &mut self.0[slot]
    }

    /// The request at `slot` is over.
    pub fn forget(&mut self, slot: Slot) {
        if let Some(state) = self.0.get_mut(slot as usize) {
            *state = T::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reused_slot_is_new() {
        let mut states = PerRequest::<u32>::new();
        *states.get(3) = 7;
        assert_eq!((*states.get(3), *states.get(0)), (7, 0));
        states.forget(3);
        states.forget(9);
        assert_eq!(*states.get(3), 0);
    }
}
