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
    /// What `route` answers: "" a digest of the batch, else "kind" or "model" for a wrong one. When serving also
    /// "token", and of other hooks "entry", "accept" and "rollback".
    wrong: String,
    /// Answers that requests can live with, as far as `wrong` lets them; no token, net or logit is asked for.
    serve: bool,
    /// When serving: the model that `route` hands over to, for one token.
    to: Option<u32>,
    /// `route` waits until this file exists.
    wait_for: String,
    /// `create` does, if it is not empty.
    create_waits_for: String,
    /// `route` lets tiny numbers become zero from now on.
    flush_to_zero: bool,
    /// `create` leaves a thread behind that lives as long as the process.
    thread: bool,
    /// Lines that `create` logs.
    log_lines: u32,
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

/// As code built for speed alone does.
fn flush_to_zero() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a valid word: the state after a reset, and the two bits that make tiny numbers zero.
    unsafe {
        std::arch::asm!("ldmxcsr [{}]", in(reg) &0x9fc0_u32, options(nostack, preserves_flags));
    }
}

/// Until this file exists, if there is a name.
fn wait_for(file: &str) {
    while !file.is_empty() && !std::path::Path::new(file).exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
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
            "wrong": { "enum": ["", "kind", "model", "token", "entry", "accept", "rollback"] },
            "serve": { "type": "boolean" },
            "to": { "type": "integer", "minimum": 0 },
            "wait_for": { "type": "string" },
            "create_waits_for": { "type": "string" },
            "flush_to_zero": { "type": "boolean" },
            "thread": { "type": "boolean" },
            "log_lines": { "type": "integer", "minimum": 0 },
            "leave": { "type": "string" }
        }
    }"#;

    fn create(ctx: &Context<'_>, settings: &str) -> Result<Self, PolicyError> {
        let settings: Settings = serde_json::from_str(settings).map_err(|e| PolicyError::new(e.to_string()))?;
        let probe = Self { settings };
        probe.reach("create");
        wait_for(&probe.settings.create_waits_for);
        if !probe.settings.error.is_empty() {
            return Err(PolicyError::new(probe.settings.error.clone()));
        }
        if !probe.settings.leave.is_empty() {
            let sleep = std::process::Command::new("sleep").arg(&probe.settings.leave).spawn();
            sleep.map_err(|e| PolicyError::new(e.to_string()))?;
        }
        for line in 0..probe.settings.log_lines {
            ctx.services.log(LogLevel::Warn, &format!("line {line} \x1b[31m{}", "x".repeat(5000)));
        }
        if probe.settings.thread {
            std::thread::spawn(|| {
                loop {
                    std::thread::park();
                }
            });
        }
        if probe.settings.serve {
            return Ok(probe);
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
        if self.settings.serve {
            return requirements;
        }
        (requirements.top_k, requirements.token_logits, requirements.masked_tokens) = (4, vec![1, 2], vec![3]);
        let mut net = Net::new("net", "net.pt");
        let hidden = net.hidden();
        net.linear(hidden, "w");
        requirements.nets.push(net);
        requirements
    }

    fn entry(&mut self, request: &RequestView<'_>) -> Option<ModelIndex> {
        self.reach("entry");
        if self.settings.serve {
            return (self.settings.wrong == "entry").then_some(7_777);
        }
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
        wait_for(&self.settings.wait_for);
        if self.settings.flush_to_zero {
            flush_to_zero();
        }
        let answer = match self.settings.wrong.as_str() {
            // SAFETY: three numbers, of which any values are valid.
            "kind" => unsafe { std::mem::transmute::<[u32; 3], Decision>([77, 0, u32::MAX]) },
            "model" => Decision::to(1_000_000),
            "token" => Decision::STAY.replacing(u32::MAX - 1),
            _ if self.settings.serve => self.settings.to.map_or(Decision::STAY, Decision::to),
            _ => Decision::to(digest(&format!("{batch:?}"))),
        };
        // The first row keeps what it was prefilled with.
        let kept = usize::from(!self.settings.serve);
        out.iter_mut().skip(kept).for_each(|decision| *decision = answer);
    }

    fn send(&mut self, request: &RequestView<'_>, to: ModelIndex) -> Handoff {
        self.reach("send");
        if self.settings.serve {
            let mut handoff = Handoff::default().budget(1);
            handoff.rollback = if self.settings.wrong == "rollback" { 5_000 } else { 0 };
            return handoff;
        }
        let mut handoff = Handoff::drop_candidate().budget(to);
        handoff.payload = format!("{request:?}").into_bytes();
        // Slot 99 asks for more than any hand-off may hold; the host says so.
        handoff.payload.resize(if request.slot == 99 { MAX_PAYLOAD_BYTES + 1 } else { handoff.payload.len() }, b' ');
        handoff
    }

    fn receive(&mut self, request: &RequestView<'_>, message: &PeerView<'_>) -> Acceptance {
        self.reach("receive");
        if self.settings.serve {
            return if self.settings.wrong == "accept" { Acceptance::Accept(9_999) } else { Acceptance::Verify };
        }
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
