//! The nets that runners hold, and how many routes use each. Pure.

use crate::request::ModelId;
use crate::runner::net::{NetDigest, NetId};

struct Held {
    model: ModelId,
    digest: NetDigest,
    id: NetId,
    users: usize,
    /// It stays with its runner without users.
    stays: bool,
    /// The runner was told to give it up. Nobody can use it any more, and its id is free once that is done.
    leaving: bool,
}

#[derive(Default)]
pub(super) struct NetTable(Vec<Held>);

impl NetTable {
    fn find(&mut self, model: ModelId, id: NetId) -> Option<&mut Held> {
        self.0.iter_mut().find(|held| held.model == model && held.id == id)
    }

    /// Use a net that the runner of `model` holds.
    pub fn claim(&mut self, model: ModelId, digest: &NetDigest) -> Option<NetId> {
        let held = self.0.iter_mut().find(|h| h.model == model && h.digest == *digest && !h.leaving)?;
        held.users += 1;
        Some(held.id)
    }

    /// Use a net that somebody uses already.
    pub fn use_again(&mut self, model: ModelId, id: NetId) -> Option<()> {
        self.find(model, id).filter(|held| !held.leaving).map(|held| held.users += 1)
    }

    /// An id for a net that the runner of `model` is to take.
    pub fn free_id(&self, model: ModelId) -> NetId {
        let used = |id: u32| self.0.iter().any(|held| held.model == model && held.id == NetId(id));
        NetId((0..).find(|&id| !used(id)).unwrap_or(u32::MAX))
    }

    /// The runner of `model` takes a net, for its first user. `stays`: it cannot give it up.
    pub fn enter(&mut self, model: ModelId, digest: NetDigest, id: NetId, stays: bool) {
        self.0.push(Held { model, digest, id, users: 1, stays, leaving: false });
    }

    /// A user of each of `ids` is gone. Answers with those that the runner is to give up.
    pub fn release(&mut self, model: ModelId, ids: &[NetId]) -> Vec<NetId> {
        let mut unused = Vec::new();
        for &id in ids {
            let Some(held) = self.find(model, id) else { continue };
            held.users = held.users.saturating_sub(1);
            if held.users == 0 && !held.stays {
                held.leaving = true;
                unused.push(id);
            }
        }
        unused
    }

    /// The runner of `model` has given up `ids`.
    pub fn gave_up(&mut self, model: ModelId, ids: &[NetId]) {
        self.0.retain(|held| held.model != model || !ids.contains(&held.id));
    }

    /// How many there are of `model`.
    pub fn count(&self, model: ModelId) -> usize {
        self.0.iter().filter(|held| held.model == model).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_net_goes_with_its_last_user_and_its_id_after_that() {
        let (a, b) = (ModelId(0), ModelId(1));
        let mut nets = NetTable::default();
        assert_eq!(nets.claim(a, &[1; 32]), None);
        nets.enter(a, [1; 32], NetId(0), false);
        nets.enter(b, [1; 32], NetId(0), true);
        assert_eq!((nets.claim(a, &[1; 32]), nets.claim(a, &[2; 32])), (Some(NetId(0)), None));
        assert_eq!(nets.free_id(a), NetId(1));
        assert_eq!(nets.release(a, &[NetId(0)]), []);
        assert_eq!(nets.release(a, &[NetId(0)]), [NetId(0)]);
        // It is on its way out: the same net is another one now.
        assert_eq!((nets.claim(a, &[1; 32]), nets.free_id(a)), (None, NetId(1)));
        assert_eq!((nets.use_again(a, NetId(0)), nets.use_again(a, NetId(1))), (None, None));
        nets.enter(a, [1; 32], NetId(1), false);
        nets.gave_up(a, &[NetId(0)]);
        assert_eq!((nets.free_id(a), nets.claim(a, &[1; 32]), nets.count(a)), (NetId(0), Some(NetId(1)), 1));
        assert_eq!(nets.use_again(a, NetId(1)), Some(()));
        // It has been named three times.
        let given_up = [(); 3].map(|()| nets.release(a, &[NetId(1)]));
        assert_eq!(given_up, [vec![], vec![], vec![NetId(1)]]);
        // One that the runner cannot give up is there for the next user.
        assert_eq!((nets.release(b, &[NetId(0)]), nets.claim(b, &[1; 32])), (vec![], Some(NetId(0))));
    }
}
