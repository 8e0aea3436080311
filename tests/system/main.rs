//! The whole engine on the demo models: recorded traces, and what must not change them.

mod bugs;
mod demo;
mod drafts;
mod fault;
mod flood;
mod http;
mod load;
mod overrides;
mod reload;
mod structured;
mod traces;
