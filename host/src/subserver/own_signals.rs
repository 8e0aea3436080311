//! The signals that one route asks for at one model, beyond the scalars that every route shares.

use tokenrouter_plugin_api::Requirements;

use crate::request::SignalName;
use crate::runner::net::NetId;
use crate::runner::{Columns, NetScores, SignalRequest};

/// What a route asks for, with the columns that have it.
#[derive(Clone, Copy, Debug)]
pub struct OwnSignals<'a> {
    pub requirements: &'a Requirements,
    /// The runner's ids of the nets in `requirements`.
    pub nets: &'a [NetId],
    pub columns: &'a Columns,
    /// What `columns` were computed for.
    pub computed: &'a SignalRequest,
}

impl<'a> OwnSignals<'a> {
    /// `token_logit_ID` for each token, then `net_NAME` for each net, or `net_NAME_I` where its score has
    /// several numbers. The same in every forward of the route's requests at this model.
    pub fn names(self) -> Vec<SignalName> {
        let mut names: Vec<SignalName> =
            self.token_places().map(|(id, _)| format!("token_logit_{id}").into()).collect();
        for (name, scores) in self.scores() {
            match scores.width {
                1 => names.push(format!("net_{name}").into()),
                width => names.extend((0..width).map(|i| SignalName::from(format!("net_{name}_{i}")))),
            }
        }
        names
    }

    /// Values of `row`, in the order of [`Self::names`].
    pub fn values(self, row: usize) -> impl Iterator<Item = f32> {
        let width = self.computed.token_logits.len();
        let logits = self.token_places().map(move |(_, place)| self.columns.token_logits[row * width + place]);
        logits.chain(self.scores().flat_map(move |(_, scores)| scores.row(row)).copied())
    }

    /// The tokens asked for that were computed, with their places.
    fn token_places(self) -> impl Iterator<Item = (u32, usize)> + 'a {
        let Self { requirements, computed, .. } = self;
        requirements.token_logits.iter().filter_map(|id| {
            let place = computed.token_logits.iter().position(|computed| computed == id)?;
            Some((*id, place))
        })
    }

    fn scores(self) -> impl Iterator<Item = (&'a str, &'a NetScores)> {
        let Self { requirements, nets, columns, .. } = self;
        requirements.nets.iter().zip(nets).filter_map(|(net, &id)| Some((&*net.name, columns.net(id)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_plugin_api::net::Net;

    #[test]
    fn only_what_the_route_asks_for() {
        let mut requirements = Requirements::default();
        requirements.token_logits = vec![9, 4];
        requirements.nets = ["defer", "missing", "probs"].map(|name| Net::new(name, "w")).into();
        let scores = |width, scores: &[f32]| NetScores { width, scores: scores.to_vec() };
        // Two rows; token 1 and net 7 are another route's.
        let columns = Columns {
            token_logits: vec![0.1, 0.4, 0.9, 1.1, 1.4, 1.9],
            nets: vec![
                (NetId(2), scores(1, &[20.0, 21.0])),
                (NetId(5), scores(2, &[50.0, 51.0, 52.0, 53.0])),
                (NetId(7), scores(1, &[70.0, 71.0])),
            ],
            ..Columns::default()
        };
        let computed = SignalRequest { token_logits: vec![1, 4, 9], ..SignalRequest::default() };
        let nets = [NetId(2), NetId(3), NetId(5)];
        let own = OwnSignals { requirements: &requirements, nets: &nets, columns: &columns, computed: &computed };
        assert_eq!(own.names(), ["token_logit_9", "token_logit_4", "net_defer", "net_probs_0", "net_probs_1"]);
        assert_eq!(own.values(0).collect::<Vec<_>>(), [0.9, 0.4, 20.0, 50.0, 51.0]);
        assert_eq!(own.values(1).collect::<Vec<_>>(), [1.9, 1.4, 21.0, 52.0, 53.0]);
    }
}
