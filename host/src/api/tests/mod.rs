//! The router called directly, on the real engine with models that recite.

mod admin;
mod answers;
mod bugs;
mod choices;
mod connections;
mod down;
mod errors;
mod fixture;
mod forms;
mod front;
mod lines;
mod metrics;
mod openapi;
mod prompts;
mod scrape;
mod streams;
mod surface;
mod tls;
#[cfg(feature = "otel")]
mod traces;
