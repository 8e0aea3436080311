//! From the tree to [`Config`]. Pure.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::batching::batching;
use super::error::Fault;
use super::front::front;
use super::gpu::{device, dtype, gpu};
use super::key::admin_keys;
use super::record::record;
use super::route::{refuse_recorded_overrides, route};
use super::traces::traces;
use super::tree::{self, Field, Key, Section};
use super::{Config, DeviceChoice, DtypeChoice, ModelConfig, Places, Pool, ServerConfig, Weights};
use crate::plain::suggestion;
use crate::runner::model_config::shapes;
use crate::subserver::coordinator::Waiting;

/// `max_wait_ms` where it is not given.
pub const DEFAULT_MAX_WAIT: Duration = Duration::from_millis(50);

pub(super) fn config(text: &str, file: &Path, variables: &BTreeMap<String, String>) -> Result<Config, Fault> {
    let mut root = tree::parse(text)?;
    tree::override_from_env(&mut root, variables)?;
    let places = Places::of(&root);
    let mut root = Field { name: String::new(), node: root }.section()?;

    let server = root.take("server").map(|f| server(f.section()?)).transpose()?.unwrap_or_default();
    let gpu = root.take("gpu").map(|f| gpu(f.section()?)).transpose()?.unwrap_or_default();
    let batching = root.take("batching").map(|f| batching(f.section()?)).transpose()?.unwrap_or_default();
    let plugin_dirs = root
        .take("plugin_dirs")
        .map(|f| f.array("strings")?.iter().map(|d| Ok(PathBuf::from(d.text()?))).collect::<Result<Vec<_>, Fault>>())
        .transpose()?;
    let models = root.take("models").map(named).transpose()?.unwrap_or_default();
    let recording = root.take("record");
    let traces = root.take("traces").map(|f| traces(&f)).transpose()?;
    let routes = root.take("routes").map(named).transpose()?.unwrap_or_default();
    root.end()?;

    let models = models.into_iter().map(|(key, field)| model(key, field)).collect::<Result<Vec<_>, _>>()?;
    if models.is_empty() {
        let message = "no model is configured; add a table [models.NAME] with `path = \"DIRECTORY\"`".into();
        return Err(Fault { origin: None, message });
    }
    let routes = routes.into_iter().map(|(key, field)| route(key, field, &models)).collect::<Result<Vec<_>, _>>()?;
    let names: Vec<&str> = routes.iter().map(|r| &*r.name).chain(models.iter().map(|m| &*m.name)).collect();
    let record = recording.map(|field| record(&field, &names)).transpose()?;
    let file = file.into();
    let config = Config { file, server, gpu, batching, plugin_dirs, models, routes, record, traces, places };
    refuse_recorded_overrides(&config)?;
    Ok(config)
}

/// The tables of `[models]` or `[routes]`. Names are what clients write in `model`.
fn named(field: Field) -> Result<Vec<(Key, Field)>, Fault> {
    let entries = field.section()?.rest();
    for (key, entry) in &entries {
        let fits = |c: char| c.is_ascii_alphanumeric() || "-_.:/@+".contains(c);
        if key.name.is_empty() || key.name.len() > 128 || !key.name.chars().all(fits) {
            let message = format!(
                "[{}.{:?}]: a name has 1 to 128 letters, digits or - _ . : / @ + and nothing else",
                field.name, key.name
            );
            return Err(Fault::at(&key.origin, message));
        }
        entry.section()?;
    }
    Ok(entries)
}

fn server(mut section: Section) -> Result<ServerConfig, Fault> {
    let mut server = ServerConfig::default();
    if let Some(field) = section.take("host") {
        server.host = field.text()?.parse().map_err(|_| {
            field.fault("must be an IP address to listen at: \"127.0.0.1\" for this machine alone, \"0.0.0.0\" for all")
        })?;
    }
    if let Some(field) = section.take("port") {
        // 0 lets the system choose; the port is printed.
        server.port = field.integer(0..=65535)? as u16;
    }
    if let Some(field) = section.take("max_body_bytes") {
        server.max_body_bytes = field.integer(1024..=1 << 40)? as usize;
    }
    if let Some(field) = section.take("max_requests") {
        server.max_requests = field.integer(1..=1 << 20)? as usize;
    }
    if let Some(field) = section.take("drain_timeout") {
        server.drain_timeout = Duration::from_secs_f64(field.number(0.0..=86400.0)?);
    }
    if let Some(field) = section.take("admin") {
        let address: SocketAddr = field
            .text()?
            .parse()
            .map_err(|_| field.fault("must be an IP address with a port, for example \"127.0.0.1:8081\""))?;
        if address.port() != 0 && (address.ip(), address.port()) == (server.host, server.port) {
            return Err(field.fault("is where everything else is served; choose another port"));
        }
        server.admin = Some(address);
    }
    server.admin_keys = admin_keys(&mut section)?;
    if let Some(field) = section.take("abort_on_hung_plugin_s") {
        server.abort_on_hung_plugin = Some(Duration::from_secs_f64(field.number(1.0..=86400.0)?));
    }
    server.front = front(&mut section, !server.admin_keys.is_empty())?;
    section.end()?;
    Ok(server)
}

fn model(key: Key, field: Field) -> Result<ModelConfig, Fault> {
    let mut section = field.section()?;
    let (path, weights) = source(&mut section)?;
    let device_field = section.take("device");
    let device = device_field.as_ref().map(device).transpose()?.unwrap_or_default();
    let dtype_field = section.take("dtype");
    let dtype = dtype_field.as_ref().map(dtype).transpose()?.unwrap_or_default();
    if let (DeviceChoice::Cpu, Some(field)) = (device, dtype_field.filter(|_| dtype == DtypeChoice::Bf16)) {
        return Err(field.fault("the CPU computes in f32; use \"f32\" or \"auto\", or device = \"cuda\""));
    }
    if let (Weights::Random(_), DeviceChoice::Cpu, Some(field)) = (weights, device, device_field) {
        return Err(field.fault("a model with random weights (`shape`) runs on CUDA only; use device = \"cuda\""));
    }
    let Waiting { min_batch, max_wait, hold } = waiting(&mut section)?;
    let pool = pool(&mut section)?;
    let max_rows = section.take("max_rows").map(|f| f.integer(1..=65536)).transpose()?.map(|rows| rows as u32);
    let prefill_chunk = match section.take("prefill_chunk") {
        Some(field) => {
            let chunk = field.integer(1..=65536)? as u32;
            if let Some(rows) = max_rows.filter(|rows| chunk > *rows) {
                return Err(field.fault(format!("must not be above max_rows ({rows})")));
            }
            Some(chunk)
        }
        None => None,
    };
    let multiprocessors = match section.take("multiprocessors") {
        Some(field) if device == DeviceChoice::Cpu => {
            return Err(field.fault("the CPU has none; use device = \"cuda\", or leave it out"));
        }
        field => field.map(|f| f.integer(1..=1024)).transpose()?.map(|count| count as u32),
    };
    let prefix_cache = section.take("prefix_cache").map(|f| f.boolean()).transpose()?.unwrap_or(true);
    let context = section.take("context").map(|f| f.integer(1..=1 << 30)).transpose()?.map(|c| c as u32);
    let masked_tokens = match section.take("masked_tokens") {
        Some(field) => field.array("strings")?.iter().map(Field::text).collect::<Result<_, _>>()?,
        None => Vec::new(),
    };
    section.end()?;
    Ok(ModelConfig {
        name: key.name,
        path,
        weights,
        device,
        dtype,
        min_batch,
        max_wait,
        hold,
        pool,
        max_rows,
        prefill_chunk,
        multiprocessors,
        prefix_cache,
        context,
        masked_tokens,
    })
}

/// When a model starts its forwards.
pub(crate) fn waiting(section: &mut Section) -> Result<Waiting, Fault> {
    let min_batch = section.take("min_batch").map(|f| ladder(&f)).transpose()?.unwrap_or_else(|| vec![1]);
    let mut time = |key, default| match section.take(key) {
        Some(field) => Ok(Duration::from_secs_f64(field.number(0.0..=60_000.0)? / 1000.0)),
        None => Ok(default),
    };
    let (max_wait, hold) = (time("max_wait_ms", DEFAULT_MAX_WAIT)?, time("hold_ms", Duration::ZERO)?);
    Ok(Waiting { min_batch, max_wait, hold })
}

/// The directory, and what the weights are.
fn source(section: &mut Section) -> Result<(String, Weights), Fault> {
    let (path, shape, tokenizer) = (section.take("path"), section.take("shape"), section.take("tokenizer"));
    match (path, shape, tokenizer) {
        (Some(_), Some(shape), _) => {
            Err(shape.fault("`path` gives the weights already; keep `path`, or `shape` with `tokenizer`"))
        }
        (Some(_), None, Some(tokenizer)) => {
            Err(tokenizer.fault("goes with `shape`; a model with a `path` has the tokenizer of that directory"))
        }
        (Some(path), None, None) => Ok((path.text()?, Weights::Directory)),
        (None, Some(shape), Some(tokenizer)) => {
            let name = shape.text()?;
            let known = shapes::find(&name).ok_or_else(|| {
                let known = shapes::SHAPES.iter().map(|shape| shape.name);
                shape.fault(format!("is not a known shape: {}", suggestion(&name, known)))
            })?;
            Ok((tokenizer.text()?, Weights::Random(known)))
        }
        (None, Some(shape), None) => {
            Err(shape.fault("needs a tokenizer; add `tokenizer = \"DIRECTORY\"` with a tokenizer.json"))
        }
        (None, None, _) => Err(section.fault("has no `path`; add `path = \"DIRECTORY\"` or `path = \"ORG/NAME\"`")),
    }
}

fn ladder(field: &Field) -> Result<Vec<u32>, Fault> {
    let step = |f: &Field| Ok(f.integer(1..=4096)? as u32);
    if !field.is_array() {
        return Ok(vec![step(field)?]);
    }
    let steps = field.array("integers")?;
    if steps.is_empty() {
        return Err(field.fault("must have at least one step, for example [1, 2, 2, 3]"));
    }
    let ladder = steps.iter().map(step).collect::<Result<Vec<_>, Fault>>()?;
    for (i, (step, active)) in ladder.iter().zip(1u32..).enumerate() {
        if *step > active {
            let message = format!("with {active} active requests a batch of {step} never fills; at most {active}");
            return Err(steps[i].fault(message));
        }
    }
    Ok(ladder)
}

/// The size of the K/V pool, given in one of three units.
fn pool(section: &mut Section) -> Result<Option<Pool>, Fault> {
    let fields: Vec<(&str, Field)> =
        ["pages", "kv_tokens", "kv_memory"].into_iter().filter_map(|key| Some((key, section.take(key)?))).collect();
    if let [(first, _), (_, second), ..] = fields.as_slice() {
        return Err(second.fault(format!("`{first}` gives the size of the K/V pool already; keep one of them")));
    }
    let Some((key, field)) = fields.into_iter().next() else { return Ok(None) };
    Ok(Some(match key {
        "pages" => Pool::Pages(field.integer(1..=1 << 30)? as u32),
        "kv_tokens" => Pool::Tokens(field.integer(1..=1 << 34)? as u64),
        _ => Pool::Bytes(size(&field)?),
    }))
}

/// A number of bytes, written with its unit.
pub(super) fn size(field: &Field) -> Result<u64, Fault> {
    let wrong = "must be a size with its unit, for example \"512MiB\" or \"2GiB\"";
    let size = bytes(&field.text()?).ok_or_else(|| field.fault(wrong))?;
    let fits = (1.0..=1e15).contains(&size);
    if fits { Ok(size as u64) } else { Err(field.fault("must be from 1B to 1000TB")) }
}

/// A size such as `512MiB` or `1.5 GB`.
fn bytes(text: &str) -> Option<f64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let number: f64 = text[..digits].parse().ok()?;
    let unit: u64 = match text[digits..].trim() {
        "B" => 1,
        "KB" | "kB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => return None,
    };
    Some(number * unit as f64)
}
