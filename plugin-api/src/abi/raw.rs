//! Mirrors of the views and answers. Flags and kinds are numbers that the receiver checks, so that no
//! bit pattern is undefined behaviour.

use abi_stable::{
    StableAbi,
    std_types::{ROption, RResult, RSlice, RStr, RString, RVec},
};

use super::net::{RawNet, RawWeights};
use crate::net::Net;
use crate::{
    Acceptance, Handoff, ModelIndex, NO_MODEL, PeerView, RequestView, Requirements, RouteBatch, SignalColumns,
    SignalSet,
};

#[repr(C)]
#[derive(StableAbi)]
pub struct RawModel<'a> {
    pub name: RStr<'a>,
    pub role: RStr<'a>,
}

/// Services of the host. `data` is what the functions want as their first argument.
#[repr(C)]
#[derive(StableAbi)]
pub struct RawServices {
    pub data: *const (),
    pub token_bytes: unsafe extern "C" fn(*const (), u32) -> ROption<RVec<u8>>,
    pub token_id: unsafe extern "C" fn(*const (), RStr<'_>) -> ROption<u32>,
    pub weights: unsafe extern "C" fn(*const (), RStr<'_>) -> RResult<RawWeights, RString>,
    pub log: unsafe extern "C" fn(*const (), u32, RStr<'_>),
    /// Like [`Root::get_extension`](super::Root::get_extension), the other way round.
    pub get_extension: unsafe extern "C" fn(*const (), RStr<'_>) -> *const (),
}

#[repr(C)]
#[derive(StableAbi)]
pub struct RawContext<'a> {
    pub route: RStr<'a>,
    pub models: RSlice<'a, RawModel<'a>>,
    pub eos: RSlice<'a, u32>,
    pub model: u32,
    pub entry: u32,
    pub vocab_size: u32,
    pub services: RawServices,
}

#[repr(C)]
#[derive(StableAbi)]
pub struct RawRequest<'a> {
    pub id: u64,
    pub seed: u64,
    pub tokens: RSlice<'a, u32>,
    pub slot: u32,
    pub prompt_len: u32,
    pub max_tokens: u32,
    pub provisional: u32,
    pub candidate: u32,
}

impl<'a> RawRequest<'a> {
    #[cfg(feature = "host")]
    pub fn new(view: &RequestView<'a>) -> Self {
        let RequestView { id, slot, seed, prompt_len, max_tokens, tokens, provisional, candidate } = *view;
        Self { id, seed, tokens: tokens.into(), slot, prompt_len, max_tokens, provisional, candidate }
    }

    pub fn view(&self) -> RequestView<'a> {
        let Self { id, seed, tokens, slot, prompt_len, max_tokens, provisional, candidate } = *self;
        RequestView { id, slot, seed, prompt_len, max_tokens, tokens: tokens.as_slice(), provisional, candidate }
    }
}

#[repr(C)]
#[derive(StableAbi)]
pub struct RawPeer<'a> {
    pub tokens: RSlice<'a, u32>,
    pub payload: RSlice<'a, u8>,
    pub from: u32,
    pub provisional: u32,
}

impl<'a> RawPeer<'a> {
    #[cfg(feature = "host")]
    pub fn new(view: &PeerView<'a>) -> Self {
        let PeerView { from, tokens, provisional, payload } = *view;
        Self { tokens: tokens.into(), payload: payload.into(), from, provisional }
    }

    pub fn view(&self) -> PeerView<'a> {
        PeerView {
            from: self.from,
            tokens: self.tokens.as_slice(),
            provisional: self.provisional,
            payload: self.payload.as_slice(),
        }
    }
}

/// Declares the mirror of a struct of columns and counts, with the conversions both ways.
macro_rules! columns {
    ($raw:ident, $view:ident { $($column:ident: $item:ty),* } { $($count:ident),* }) => {
        #[repr(C)]
        #[derive(StableAbi)]
        pub struct $raw<'a> {
            $(pub $column: RSlice<'a, $item>,)*
            $(pub $count: u32,)*
        }

        impl<'a> $raw<'a> {
            #[cfg(feature = "host")]
            pub fn new(view: &$view<'a>) -> Self {
                Self { $($column: view.$column.into(),)* $($count: view.$count,)* }
            }

            pub fn view(&self) -> $view<'a> {
                $view { $($column: self.$column.as_slice(),)* $($count: self.$count,)* }
            }
        }
    };
}

columns!(RawSignals, SignalColumns {
    entropy: f32, entropy_norm: f32, top1_prob: f32, margin: f32, logsumexp: f32, candidate_prob: f32,
    topk_values: f32, topk_ids: u32, token_logits: f32, net_scores: f32
} { top_k, token_logit_count, net_width });

#[repr(C)]
#[derive(StableAbi)]
pub struct RawBatch<'a> {
    pub request_ids: RSlice<'a, u64>,
    pub slots: RSlice<'a, u32>,
    pub seeds: RSlice<'a, u64>,
    pub positions: RSlice<'a, u32>,
    pub candidates: RSlice<'a, u32>,
    pub drafts: RSlice<'a, u32>,
    pub last_models: RSlice<'a, u32>,
    pub remaining: RSlice<'a, u32>,
    pub signals: RawSignals<'a>,
}

impl<'a> RawBatch<'a> {
    #[cfg(feature = "host")]
    pub fn new(view: &RouteBatch<'a>) -> Self {
        let RouteBatch { request_ids, slots, seeds, positions, candidates, drafts, last_models, remaining, signals } =
            view;
        Self {
            request_ids: (*request_ids).into(),
            slots: (*slots).into(),
            seeds: (*seeds).into(),
            positions: (*positions).into(),
            candidates: (*candidates).into(),
            drafts: (*drafts).into(),
            last_models: (*last_models).into(),
            remaining: (*remaining).into(),
            signals: RawSignals::new(signals),
        }
    }

    pub fn view(&self) -> RouteBatch<'a> {
        RouteBatch {
            request_ids: self.request_ids.as_slice(),
            slots: self.slots.as_slice(),
            seeds: self.seeds.as_slice(),
            positions: self.positions.as_slice(),
            candidates: self.candidates.as_slice(),
            drafts: self.drafts.as_slice(),
            last_models: self.last_models.as_slice(),
            remaining: self.remaining.as_slice(),
            signals: self.signals.view(),
        }
    }
}

#[repr(C)]
#[derive(StableAbi)]
pub struct RawRequirements {
    pub token_logits: RVec<u32>,
    pub masked_tokens: RVec<u32>,
    pub nets: RVec<RawNet>,
    pub signals: u32,
    pub top_k: u32,
}

impl From<Requirements> for RawRequirements {
    fn from(from: Requirements) -> Self {
        let Requirements { signals, top_k, token_logits, masked_tokens, nets } = from;
        Self {
            token_logits: token_logits.into(),
            masked_tokens: masked_tokens.into(),
            nets: nets.into_iter().map(RawNet::from).collect(),
            signals: signals.bits(),
            top_k,
        }
    }
}

impl TryFrom<RawRequirements> for Requirements {
    type Error = String;
    fn try_from(raw: RawRequirements) -> Result<Self, String> {
        let signals = SignalSet::from_bits(raw.signals)
            .ok_or_else(|| format!("asks for signals {:#x}, of which some are unknown here", raw.signals))?;
        let (token_logits, masked_tokens) = (raw.token_logits.to_vec(), raw.masked_tokens.to_vec());
        let nets = raw.nets.into_iter().map(Net::try_from).collect::<Result<_, _>>()?;
        Ok(Self { signals, top_k: raw.top_k, token_logits, masked_tokens, nets })
    }
}

/// `kind` 0: no model, 1: `model`.
#[repr(C)]
#[derive(StableAbi)]
pub struct RawEntry {
    pub kind: u32,
    pub model: u32,
}

impl From<Option<ModelIndex>> for RawEntry {
    fn from(model: Option<ModelIndex>) -> Self {
        Self { kind: model.is_some().into(), model: model.unwrap_or(NO_MODEL) }
    }
}

impl TryFrom<RawEntry> for Option<ModelIndex> {
    type Error = String;
    fn try_from(raw: RawEntry) -> Result<Self, String> {
        match raw.kind {
            0 => Ok(None),
            1 => Ok(Some(raw.model)),
            kind => Err(format!("answered with unknown kind {kind}")),
        }
    }
}

const KEEP_CANDIDATE: u32 = 1;
const HAS_BUDGET: u32 = 1 << 1;
const VERIFY: u32 = 1 << 2;

#[repr(C)]
#[derive(StableAbi)]
pub struct RawHandoff {
    pub payload: RVec<u8>,
    pub flags: u32,
    pub budget: u32,
    pub rollback: u32,
}

impl From<Handoff> for RawHandoff {
    fn from(from: Handoff) -> Self {
        let Handoff { keep_candidate, budget, rollback, verify, payload } = from;
        let flag = |set: bool, bit: u32| if set { bit } else { 0 };
        Self {
            payload: payload.into(),
            flags: flag(keep_candidate, KEEP_CANDIDATE) | flag(budget.is_some(), HAS_BUDGET) | flag(verify, VERIFY),
            budget: budget.unwrap_or(0),
            rollback,
        }
    }
}

impl TryFrom<RawHandoff> for Handoff {
    type Error = String;
    fn try_from(raw: RawHandoff) -> Result<Self, String> {
        if raw.flags & !(KEEP_CANDIDATE | HAS_BUDGET | VERIFY) != 0 {
            return Err(format!("answered with flags {:#x}, of which some are unknown here", raw.flags));
        }
        Ok(Self {
            keep_candidate: raw.flags & KEEP_CANDIDATE != 0,
            budget: (raw.flags & HAS_BUDGET != 0).then_some(raw.budget),
            rollback: raw.rollback,
            verify: raw.flags & VERIFY != 0,
            payload: raw.payload.to_vec(),
        })
    }
}

/// `kind` 0: verify, 1: accept `count`.
#[repr(C)]
#[derive(StableAbi)]
pub struct RawAcceptance {
    pub kind: u32,
    pub count: u32,
}

impl From<Acceptance> for RawAcceptance {
    fn from(from: Acceptance) -> Self {
        match from {
            Acceptance::Verify => Self { kind: 0, count: 0 },
            Acceptance::Accept(count) => Self { kind: 1, count },
        }
    }
}

impl TryFrom<RawAcceptance> for Acceptance {
    type Error = String;
    fn try_from(raw: RawAcceptance) -> Result<Self, String> {
        match raw.kind {
            0 => Ok(Self::Verify),
            1 => Ok(Self::Accept(raw.count)),
            kind => Err(format!("answered with unknown kind {kind}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_survive_the_boundary() {
        for handoff in [
            Handoff::default(),
            Handoff::drop_candidate().budget(1),
            Handoff::default().budget(u32::MAX),
            Handoff { rollback: 3, verify: true, payload: vec![1, 2, 3], ..Handoff::default() },
        ] {
            assert_eq!(Handoff::try_from(RawHandoff::from(handoff.clone())), Ok(handoff));
        }
        for acceptance in [Acceptance::Verify, Acceptance::Accept(0), Acceptance::Accept(9)] {
            assert_eq!(Acceptance::try_from(RawAcceptance::from(acceptance)), Ok(acceptance));
        }
        for entry in [None, Some(0), Some(NO_MODEL)] {
            assert_eq!(Option::try_from(RawEntry::from(entry)), Ok(entry));
        }
        let mut requirements = Requirements::signals(SignalSet::ALL);
        (requirements.top_k, requirements.token_logits, requirements.masked_tokens) = (5, vec![1, 2], vec![3]);
        assert_eq!(Requirements::try_from(RawRequirements::from(requirements.clone())), Ok(requirements));
    }

    #[test]
    fn undecodable_answers_are_errors() {
        let handoff = RawHandoff { payload: RVec::new(), flags: 8, budget: 0, rollback: 0 };
        assert_eq!(Handoff::try_from(handoff).unwrap_err(), "answered with flags 0x8, of which some are unknown here");
        assert_eq!(
            Acceptance::try_from(RawAcceptance { kind: 2, count: 0 }).unwrap_err(),
            "answered with unknown kind 2"
        );
        assert!(Option::<ModelIndex>::try_from(RawEntry { kind: 7, model: 0 }).is_err());
        let raw = RawRequirements {
            token_logits: RVec::new(),
            masked_tokens: RVec::new(),
            nets: RVec::new(),
            signals: 1 << 31,
            top_k: 0,
        };
        assert!(Requirements::try_from(raw).unwrap_err().contains("0x80000000"));
    }
}
