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
