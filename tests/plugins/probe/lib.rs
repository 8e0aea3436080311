//! A plugin that says what it sees, and fails where it is told to.

use serde::Deserialize;
use tokenrouter_plugin_api::net::Net;
use tokenrouter_plugin_api::{
    Acceptance, Context, Decision, Handoff, LogLevel, MAX_PAYLOAD_BYTES, ModelIndex, PeerView, Policy, PolicyError,
    RequestView, Requirements, RouteBatch, SignalSet, Slot, export_policy,
};

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Settings {
    /// The hook that panics.
    panic: String,
    /// The message of `create`'s error.
    error: String,
    /// How `route` ends the process, or never ends: "abort", "exit", "hang".
    end: String,
    /// What `route` answers: "" a digest of the batch, else "kind" or "model" for a wrong one.
    wrong: String,
    /// Seconds that a program sleeps which `create` starts and leaves behind.
    leave: String,
}

struct Probe {
    settings: Settings,
}

impl Probe {
    fn reach(&self, hook: &str) {
        if self.settings.panic == hook {
            panic!("the {hook} hook was told to panic");
        }
    }
}

/// FNV-1a, so that a whole view fits into one number.
fn digest(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

impl Policy for Probe {
    const NAME: &'static str = "probe";
    const SETTINGS_SCHEMA: &'static str = r#"{
        "type": "object", "additionalProperties": false,
        "properties": {
            "panic": { "enum": ["", "create", "requirements", "entry", "route", "send", "receive", "finished", "drop"] },
            "error": { "type": "string" },
            "end": { "enum": ["", "abort", "exit", "hang"] },
            "wrong": { "enum": ["", "kind", "model"] },
            "leave": { "type": "string" }
        }
    }"#;

    fn create(ctx: &Context<'_>, settings: &str) -> Result<Self, PolicyError> {
        let settings: Settings = serde_json::from_str(settings).map_err(|e| PolicyError::new(e.to_string()))?;
        let probe = Self { settings };
        probe.reach("create");
        if !probe.settings.error.is_empty() {
            return Err(PolicyError::new(probe.settings.error.clone()));
        }
        if !probe.settings.leave.is_empty() {
            let sleep = std::process::Command::new("sleep").arg(&probe.settings.leave).spawn();
            sleep.map_err(|e| PolicyError::new(e.to_string()))?;
        }
        let Context { route, model, models, entry, vocab_size, eos, services } = ctx;
        let (bytes, none) = (services.token_bytes(7), services.token_bytes(8));
        let (id, no_id) = (services.token_id("seven"), services.token_id("eight"));
        let (weights, no_weights) = (services.weights("net.pt"), services.weights("none"));
        let text = format!(
            "{route} {model} {models:?} {entry} {vocab_size} {eos:?} {bytes:?} {none:?} {id:?} {no_id:?} {weights:?} \
             {no_weights:?}"
        );
        services.log(LogLevel::Warn, &text);
        Ok(probe)
    }

    fn requirements(&self) -> Requirements {
        self.reach("requirements");
        let mut requirements = Requirements::signals(SignalSet::ENTROPY | SignalSet::MARGIN);
        (requirements.top_k, requirements.token_logits, requirements.masked_tokens) = (4, vec![1, 2], vec![3]);
        let mut net = Net::new("net", "net.pt");
        let hidden = net.hidden();
        net.linear(hidden, "w");
        requirements.nets.push(net);
        requirements
    }

    fn entry(&mut self, request: &RequestView<'_>) -> Option<ModelIndex> {
        self.reach("entry");
        Some(digest(&format!("{request:?}")))
    }

    fn route(&mut self, batch: &RouteBatch<'_>, out: &mut [Decision]) {
        self.reach("route");
        match self.settings.end.as_str() {
            "abort" => std::process::abort(),
            "exit" => std::process::exit(0),
            "hang" => loop {
                std::thread::park();
            },
            _ => {}
        }
        let answer = match self.settings.wrong.as_str() {
            // SAFETY: three numbers, of which any values are valid.
            "kind" => unsafe { std::mem::transmute::<[u32; 3], Decision>([77, 0, u32::MAX]) },
            "model" => Decision::to(1_000_000),
            _ => Decision::to(digest(&format!("{batch:?}"))),
        };
        // The first row keeps what it was prefilled with.
        out.iter_mut().skip(1).for_each(|decision| *decision = answer);
    }

    fn send(&mut self, request: &RequestView<'_>, to: ModelIndex) -> Handoff {
        self.reach("send");
        let mut handoff = Handoff::drop_candidate().budget(to);
        handoff.payload = format!("{request:?}").into_bytes();
        // Slot 99 asks for more than any hand-off may hold; the host says so.
        handoff.payload.resize(if request.slot == 99 { MAX_PAYLOAD_BYTES + 1 } else { handoff.payload.len() }, b' ');
        handoff
    }

    fn receive(&mut self, request: &RequestView<'_>, message: &PeerView<'_>) -> Acceptance {
        self.reach("receive");
        Acceptance::Accept(digest(&format!("{request:?} {message:?}")))
    }

    fn finished(&mut self, slot: Slot) {
        self.reach("finished");
        assert_ne!(slot, 99, "slot 99 is not mine");
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.reach("drop");
    }
}

export_policy!(Probe);
