//! Traces from recordings; docs/recording.md describes their files.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use tokenrouter_plugin_api::{ModelDescription, NO_TOKEN};

use super::files;
use super::{Answer, Columns, Request, Row, Trace, prompt_length};
use crate::record::{Manifest, RECORDING_FORMAT, RECORDING_VERSION, RequestLine};

/// Columns of a shard that are no signals.
const PLAIN: [&str; 9] =
    ["request", "position", "candidate", "draft", "decision", "decision_model", "replacement", "time_us", "route"];

pub fn read(directory: &Path, route: Option<&str>) -> Result<Trace, String> {
    let run = run(directory)?;
    let text = files::part(&run, "manifest.json")?;
    let manifest: Manifest = serde_json::from_slice(&text).map_err(|e| format!("manifest.json: {e}"))?;
    if (manifest.format.as_str(), manifest.version) != (RECORDING_FORMAT, RECORDING_VERSION) {
        let Manifest { format, version, .. } = manifest;
        return Err(format!("is {format} {version}; this program reads {RECORDING_FORMAT} {RECORDING_VERSION}"));
    }
    let (mut lines, mut ids) = (Vec::new(), HashSet::new());
    for file in &manifest.requests {
        let text = String::from_utf8(files::part(&run, &file.file)?);
        let text = text.map_err(|e| format!("{}: is not UTF-8 text ({e}); copy it again", file.file))?;
        for (at, line) in text.lines().enumerate() {
            let named = |e: String| format!("{}: line {}: {e}", file.file, at + 1);
            let line: RequestLine = serde_json::from_str(line).map_err(|e| named(e.to_string()))?;
            check(&line, &manifest).map_err(named)?;
            if !ids.insert(line.id) {
                return Err(named(format!("id = {}: another line has it, too", line.id)));
            }
            lines.push(line);
        }
    }
    let index = choose(&manifest, &lines, route)?;
    lines.retain(|line| line.route as usize == index);
    let mut read = Read { rows: HashMap::new(), columns: vec![Columns::default(); manifest.models.len()] };
    for shard in &manifest.shards {
        let model = manifest.models.iter().position(|model| model.name == shard.model);
        let model = model.ok_or_else(|| format!("{}: model `{}` is not in the manifest", shard.file, shard.model))?;
        let bytes = files::part(&run, &shard.file)?;
        read.shard(&bytes, model, index, &manifest).map_err(|e| format!("{}: {e}", shard.file))?;
    }
    let described = &manifest.routes[index];
    if described.entry >= described.models.len() {
        let (entry, models) = (described.entry, described.models.len());
        return Err(format!("manifest.json: route `{}`: entry = {entry}, of {models} models", described.name));
    }
    let models = described.models.iter().map(|m| ModelDescription { name: m.name.clone(), role: m.role.clone() });
    let mut notes = Vec::new();
    if manifest.dropped_rows > 0 {
        notes.push(format!("The recording lost {} evaluations: the disk was too slow.", manifest.dropped_rows));
    }
    if lines.iter().any(|line| line.prompt_ids.is_none()) {
        notes.push("Prompts are not recorded (record.requests): a policy that reads them sees unknown tokens.".into());
    }
    Ok(Trace {
        source: format!("route {}", described.name),
        route: Some((models.collect(), described.entry)),
        plugin: described.plugin.clone(),
        models: manifest.models.iter().map(|model| model.name.clone()).collect(),
        requests: lines.into_iter().map(|line| read.request(line)).collect(),
        columns: read.columns,
        vocab_size: manifest.models.iter().map(|model| model.vocab_size).min().unwrap_or_default(),
        notes,
    })
}

/// The directory of the run.
fn run(directory: &Path) -> Result<PathBuf, String> {
    if directory.join("manifest.json").is_file() {
        return Ok(directory.to_owned());
    }
    let entries = std::fs::read_dir(directory).map_err(files::unread)?;
    let mut runs: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    runs.retain(|path| path.join("manifest.json").is_file());
    runs.sort();
    match &runs[..] {
        [run] => Ok(run.clone()),
        [] => Err("is no recording: it has no manifest.json; give a run of a recording, such as run-00000".into()),
        [.., last] => Err(format!("holds {} runs; give one, such as {}", runs.len(), last.display())),
    }
}

/// What the rest of a replay counts on, and what no server writes.
fn check(line: &RequestLine, manifest: &Manifest) -> Result<(), String> {
    let (models, routes) = (manifest.models.len(), manifest.routes.len());
    if line.route as usize >= routes {
        return Err(format!("route = {}: the manifest has {routes} routes", line.route));
    }
    if let Some((at, writer)) = line.writers.iter().enumerate().find(|(_, writer)| **writer as usize >= models) {
        return Err(format!("writers/{at} = {writer}: the manifest has {models} models"));
    }
    let length = |field: &str, found: Option<usize>, field_of: &str, wanted: u64| match found {
        Some(found) if found as u64 != wanted => Err(format!("{field}: has {found} ids, but {field_of} says {wanted}")),
        _ => Ok(()),
    };
    length("prompt_ids", line.prompt_ids.as_ref().map(Vec::len), "prompt_tokens", line.prompt_tokens)?;
    let written = line.writers.len() as u64;
    length("token_ids", line.token_ids.as_ref().map(Vec::len), "the number of writers", written)?;
    if written > line.max_tokens.into() {
        return Err(format!("writers: are {written}, more than max_tokens = {}", line.max_tokens));
    }
    let vocab = widest(manifest);
    for (field, ids) in [("prompt_ids", &line.prompt_ids), ("token_ids", &line.token_ids)] {
        if let Some((at, id)) = ids.iter().flatten().enumerate().find(|(_, id)| **id >= vocab) {
            return Err(format!("{field}/{at} = {id}: no model has more than {vocab} tokens"));
        }
    }
    prompt_length(line.prompt_tokens).map(drop)
}

/// Tokens of the model that has the most.
fn widest(manifest: &Manifest) -> u32 {
    manifest.models.iter().map(|model| model.vocab_size).max().unwrap_or_default()
}

/// The route whose requests are replayed.
fn choose(manifest: &Manifest, lines: &[RequestLine], route: Option<&str>) -> Result<usize, String> {
    let ended = |index: usize| lines.iter().filter(|line| line.route as usize == index).count();
    let with: Vec<usize> = (0..manifest.routes.len()).filter(|&index| ended(index) > 0).collect();
    let names = with.iter().map(|&index| manifest.routes[index].name.as_str()).collect::<Vec<_>>().join(", ");
    match (route, &with[..]) {
        (_, []) if manifest.stopped.is_none() => Err(format!(
            "has no request that ended yet: its server records still, or was killed. A part is written after {} rows of a \
             model, 64 MiB or ten minutes, and at the end: stop the server (SIGTERM) and try again",
            manifest.settings.shard_rows
        )),
        (_, []) => Err("has no request that ended".into()),
        (None, [index]) => Ok(*index),
        (None, _) => Err(format!("has requests of the routes {names}; choose one with --recorded")),
        (Some(route), with) => {
            let found = with.iter().find(|&&index| manifest.routes[index].name == route);
            found.copied().ok_or_else(|| format!("has no requests of --recorded {route:?}; it has those of {names}"))
        }
    }
}

struct Read {
    /// By request, with their times.
    rows: HashMap<u64, Vec<(i64, Row, Option<u32>)>>,
    columns: Vec<Columns>,
}

impl Read {
    fn shard(&mut self, bytes: &[u8], model: usize, route: usize, manifest: &Manifest) -> Result<(), String> {
        let (count, vocab, widest) = (manifest.models.len(), manifest.models[model].vocab_size, widest(manifest));
        let file = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
        let [requests, times] = [longs(&file, "request")?, longs(&file, "time_us")?];
        let [positions, candidates, drafts, models, replacements, routes] =
            ["position", "candidate", "draft", "decision_model", "replacement", "route"].map(|name| ints(&file, name));
        let (positions, candidates, drafts, models) = (positions?, candidates?, drafts?, models?);
        let (replacements, routes) = (replacements?, routes?);
        let decisions = column(&file, "decision", Dtype::U8)?;
        let rows = requests.len();
        let same = [positions.len(), candidates.len(), drafts.len(), models.len(), replacements.len(), routes.len()];
        if same.iter().any(|&len| len != rows) || times.len() != rows || decisions.len() != rows {
            return Err("its columns differ in length".into());
        }
        let taken: Vec<usize> = (0..rows).filter(|&row| routes[row] == route as i32).collect();
        let first = self.signals(&file, model, rows, &taken)?;
        for (place, &row) in taken.iter().enumerate() {
            let fault = |name: &str, value: i32, why: &str| format!("row {row}: {name} = {value}: {why}");
            if !u32::try_from(candidates[row]).is_ok_and(|id| id < vocab) {
                return Err(fault("candidate", candidates[row], &format!("the model has {vocab} tokens")));
            }
            for (name, id) in [("draft", drafts[row]), ("replacement", replacements[row])] {
                if id != -1 && !u32::try_from(id).is_ok_and(|id| id < widest) {
                    return Err(fault(name, id, &format!("must be -1, or a token's id below {widest}")));
                }
            }
            let answer = match decisions[row] {
                0 => Some(Answer::Stay),
                1 => Some(Answer::Draft),
                2 => match usize::try_from(models[row]) {
                    Ok(to) if to < count => Some(Answer::To(to)),
                    _ => {
                        let why = format!("the manifest has {count} models");
                        return Err(fault("decision_model", models[row], &why));
                    }
                },
                3 => Some(Answer::Accept),
                4 | u8::MAX => None,
                other => return Err(fault("decision", other.into(), "must be from 0 to 4, or 255")),
            };
            let position = u32::try_from(positions[row]);
            let entry = Row {
                model,
                at: first + place,
                position: position.map_err(|_| fault("position", positions[row], "must be 0 or more"))?,
                candidate: candidates[row] as u32,
                draft: u32::try_from(drafts[row]).unwrap_or(NO_TOKEN),
                asked: decisions[row] != 4,
                answer,
            };
            let replacement = u32::try_from(replacements[row]).ok();
            self.rows.entry(requests[row] as u64).or_default().push((times[row], entry, replacement));
        }
        Ok(())
    }

    /// Add the signals of the rows `taken` of a shard; answers with the place of the first.
    fn signals(&mut self, file: &SafeTensors<'_>, model: usize, rows: usize, taken: &[usize]) -> Result<usize, String> {
        let columns = &mut self.columns[model];
        let first = columns.rows;
        columns.rows += taken.len();
        for (name, tensor) in file.tensors() {
            if PLAIN.contains(&name.as_str()) || tensor.dtype() != Dtype::F32 || tensor.shape() != [rows] {
                continue;
            }
            let values = floats(tensor.data());
            let column = columns.scalars.entry(name).or_default();
            column.resize(first, f32::NAN);
            column.extend(taken.iter().map(|&row| values[row]));
        }
        // What this shard has not, but an earlier one.
        columns.scalars.values_mut().for_each(|column| column.resize(columns.rows, f32::NAN));
        let top = file.tensor("topk_values").ok();
        let width = match top.as_ref().map(|tensor| tensor.shape()) {
            None => 0,
            Some(&[found, width]) if found == rows => width,
            Some(shape) => return Err(format!("topk_values has the shape {shape:?}, not [{rows}, top_k]")),
        };
        if first > 0 && columns.top_k != width {
            return Err(format!("has {width} of the largest logits, an earlier shard {}", columns.top_k));
        }
        // No row, no width: it would be multiplied with the rows of other shards.
        if let Some(tensor) = top.filter(|_| rows > 0) {
            let (values, ids) = (floats(tensor.data()), ints(file, "topk_ids")?);
            if values.len() != rows * width || ids.len() != rows * width {
                return Err("topk_values and topk_ids differ in shape".into());
            }
            columns.top_k = width;
            for &row in taken {
                columns.topk_values.extend(&values[row * width..][..width]);
                let ids = ids[row * width..][..width].iter();
                columns.topk_ids.extend(ids.map(|&id| u32::try_from(id).unwrap_or(NO_TOKEN)));
            }
        }
        Ok(first)
    }

    fn request(&mut self, line: RequestLine) -> Request {
        let mut rows = self.rows.remove(&line.id).unwrap_or_default();
        rows.sort_by_key(|(time, row, _)| (*time, row.position));
        let written: BTreeMap<(u32, usize), u32> = rows
            .iter()
            .map(|(_, row, replacement)| ((row.position, row.model), replacement.unwrap_or(row.candidate)))
            .collect();
        let writers: Vec<usize> = line.writers.iter().map(|&writer| writer as usize).collect();
        let derived = (0u32..).zip(&writers);
        let derived = derived.map(|(at, &model)| written.get(&(at, model)).copied().unwrap_or(NO_TOKEN));
        let changes = rows.windows(2).filter(|pair| pair[0].1.model != pair[1].1.model).count() as u32;
        Request {
            id: line.id,
            seed: line.sampling.seed,
            prompt: line.prompt_ids.unwrap_or_else(|| vec![NO_TOKEN; line.prompt_tokens as usize]),
            max_tokens: line.max_tokens,
            tokens: line.token_ids.unwrap_or_else(|| derived.collect()),
            writers,
            handoffs: line.handoffs.unwrap_or(changes),
            rows: rows.into_iter().map(|(_, row, _)| row).collect(),
        }
    }
}

fn column<'a>(file: &SafeTensors<'a>, name: &str, dtype: Dtype) -> Result<&'a [u8], String> {
    let tensor = file.tensor(name).map_err(|_| format!("has no column `{name}`"))?;
    match tensor.dtype() {
        found if found == dtype => Ok(tensor.data()),
        found => Err(format!("column `{name}` is {found}, not {dtype}")),
    }
}

fn longs(file: &SafeTensors<'_>, name: &str) -> Result<Vec<i64>, String> {
    Ok(column(file, name, Dtype::I64)?.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect())
}

fn ints(file: &SafeTensors<'_>, name: &str) -> Result<Vec<i32>, String> {
    Ok(column(file, name, Dtype::I32)?.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect())
}

fn floats(data: &[u8]) -> Vec<f32> {
    data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}
