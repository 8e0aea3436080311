//! The policy plugin contract of TokenRouter.
//!
//! A *policy* decides, after each decode step of a model, whether that model goes on with a request
//! or another one takes over. An author implements [`Policy`] and names the type in
//! [`export_policy!`]; everything that crosses the library boundary stays inside this crate.
//!
//! A complete plugin, in a crate with `crate-type = ["cdylib"]`:
//!
//! ```
//! use tokenrouter_plugin_api::*;
//!
//! /// Where the small model's best token has less than an even chance, the large one writes one token.
//! struct Doubt {
//!     large: ModelIndex,
//! }
//!
//! impl Policy for Doubt {
//!     const NAME: &'static str = "doubt";
//!
//!     fn create(ctx: &Context<'_>, _settings: &str) -> Result<Self, PolicyError> {
//!         let large = ctx.find("llm").ok_or_else(|| PolicyError::new("no model has the role llm"))?;
//!         Ok(Self { large })
//!     }
//!     fn requirements(&self) -> Requirements {
//!         Requirements::signals(SignalSet::TOP1_PROB)
//!     }
//!     fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
//!         for (decision, &p) in out.iter_mut().zip(batch.signals.top1_prob) {
//!             if p < 0.5 {
//!                 *decision = Decision::to(self.large);
//!             }
//!         }
//!     }
//!     fn send(&mut self, _request: &RequestView<'_>, _to: ModelIndex) -> Handoff {
//!         Handoff::drop_candidate().budget(1)
//!     }
//! }
//!
//! export_policy!(Doubt);
//! ```
//!
//! Settings reach [`Policy::create`] as JSON, checked against [`Policy::SETTINGS_SCHEMA`]; `serde` and
//! `serde_json` read them.
//!
//! This crate knows nothing of the host.
#![deny(missing_docs)]

/// The snippets of the authors' guide are compiled with the examples of this documentation.
#[cfg(doctest)]
#[doc = include_str!("../../docs/policies.md")]
struct Guide;

#[allow(missing_docs)] // Not for authors.
mod abi;
mod context;
mod decision;
#[cfg(feature = "host")]
pub mod host;
pub mod net;
mod per_request;
mod policy;
pub mod random;
mod requirements;
mod roles;
mod views;
mod weights;

pub use context::{Context, LogLevel, ModelDescription, NoServices, Services};
pub use decision::{Acceptance, Decision, DecisionKind, Handoff, MAX_PAYLOAD_BYTES};
pub use per_request::PerRequest;
pub use policy::{Policy, PolicyError};
pub use requirements::{Requirements, SignalSet};
pub use roles::Side;
pub use views::{NO_MODEL, NO_TOKEN, PeerView, RequestView, RouteBatch, SignalColumns};
pub use weights::ModelWeights;

/// For [`export_policy!`] alone.
#[doc(hidden)]
pub mod __private {
    pub use crate::abi::glue::header;
    pub use crate::abi::metadata::{BYTES as METADATA_BYTES, encode as encode_metadata};
    pub use abi_stable::library::LibHeader;
}

/// Index of a model among the models of the policy's route, as listed in [`Context::models`].
pub type ModelIndex = u32;
/// Id of a token in the vocabulary that all models of a route share.
pub type TokenId = u32;
/// Dense index for per-request state: unique among the live requests of one policy instance and
/// reused after [`Policy::finished`].
pub type Slot = u32;
