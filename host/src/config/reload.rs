//! What a server at work can take over of a configuration that has changed. Pure.

use std::fmt::Debug;
use std::time::Duration;

use super::{
    BatchingConfig, Config, ConfigError, DeviceChoice, FrontConfig, GpuConfig, ModelConfig, Pool, RecordConfig,
    ServerConfig, Weights,
};
use crate::api::{Limits, TraceSettings};

/// Looks for the first difference.
#[derive(Default)]
struct Differences(Option<(String, String, String)>);

impl Differences {
    fn field<T: PartialEq>(&mut self, name: impl Into<String>, old: &T, new: &T, shown: impl Fn(&T) -> String) {
        if self.0.is_none() && old != new {
            self.0 = Some((name.into(), shown(old), shown(new)));
        }
    }

    /// A value that is written as Rust writes it.
    fn plain<T: PartialEq + Debug>(&mut self, name: impl Into<String>, old: &T, new: &T) {
        self.field(name, old, new, |value| format!("{value:?}"));
    }

    fn optional<T: PartialEq + Debug>(&mut self, name: impl Into<String>, old: &Option<T>, new: &Option<T>) {
        self.field(name, old, new, |value| value.as_ref().map_or("none".into(), |value| format!("{value:?}")));
    }
}

impl Config {
    /// This configuration for a server that runs `before`: its models in their order there. Routes,
    /// `plugin_dirs`, and how long models wait may differ; all else must be as it was. The error is of the first
    /// difference that only a restart puts in force.
    pub fn taken_over(self, before: &Self) -> Result<Self, ConfigError> {
        let new = self.in_order_of(before);
        // Whoever adds a key has to say here whether it needs a restart.
        let Config { file: _, server, gpu, batching, plugin_dirs: _, models, routes: _, record, traces, places: _ } =
            &new;
        let mut differences = Differences::default();
        differences.server(&before.server, server);
        differences.gpu(before.gpu, *gpu);
        differences.batching(before.batching, *batching);
        let names = |models: &[ModelConfig]| models.iter().map(|model| model.name.clone()).collect::<Vec<_>>();
        differences.plain("[models]", &names(&before.models), &names(models));
        for (old, new) in before.models.iter().zip(models) {
            differences.model(old, new, batching.online.is_some());
        }
        differences.record(before.record.as_ref(), record.as_ref());
        differences.traces(before.traces.as_ref(), traces.as_ref());
        match differences.0 {
            Some((field, was, is)) => {
                let message = format!("{field} = {is}: the server runs with {was}; restart to change it");
                let model = models.iter().filter(|model| field.starts_with(&format!("models.{}.", model.name)));
                // Names may have dots: the longest is meant.
                let model = model.max_by_key(|model| model.name.len());
                Err(match model {
                    Some(model) => new.model_error(model, message),
                    None => new.error(&format!("/{}", field.replace('.', "/")), message),
                })
            }
            None => Ok(new),
        }
    }

    /// The models that `before` has first, as it has them; the routes' indices follow.
    fn in_order_of(mut self, before: &Self) -> Self {
        let place = |name: &str| before.models.iter().position(|model| model.name == name).unwrap_or(usize::MAX);
        let mut order: Vec<usize> = (0..self.models.len()).collect();
        order.sort_by_key(|&index| place(&self.models[index].name));
        for route in &mut self.routes {
            for (model, _) in &mut route.models {
                *model = order.iter().position(|&old| old == *model).unwrap_or(*model);
            }
        }
        self.models = order.iter().map(|&index| self.models[index].clone()).collect();
        self
    }

    /// Whether the recording of a server that runs this has the route or model `name`.
    pub fn records(&self, name: &str) -> bool {
        let all_or_named =
            |names: &Option<Vec<String>>| names.as_ref().is_none_or(|names| names.iter().any(|n| n == name));
        self.record.as_ref().is_some_and(|record| all_or_named(&record.routes))
    }
}

impl Differences {
    fn server(&mut self, old: &ServerConfig, new: &ServerConfig) {
        let ServerConfig {
            host,
            port,
            max_body_bytes,
            max_requests,
            drain_timeout,
            admin,
            admin_keys,
            abort_on_hung_plugin,
            front,
        } = new;
        self.field("server.host", &old.host, host, |host| format!("\"{host}\""));
        self.plain("server.port", &old.port, port);
        self.plain("server.max_body_bytes", &old.max_body_bytes, max_body_bytes);
        self.plain("server.max_requests", &old.max_requests, max_requests);
        let seconds = |time: &std::time::Duration| time.as_secs_f64().to_string();
        self.field("server.drain_timeout", &old.drain_timeout, drain_timeout, seconds);
        let limit = |limit: &Option<std::time::Duration>| limit.as_ref().map_or("none".into(), seconds);
        self.field("server.abort_on_hung_plugin_s", &old.abort_on_hung_plugin, abort_on_hung_plugin, limit);
        self.field("server.admin", &old.admin, admin, |at| at.map_or("none".into(), |at| format!("\"{at}\"")));
        // Which they are is a secret.
        let shown = |keys: &Vec<_>| format!("{} keys that are not shown", keys.len());
        self.field("server.admin_keys", &old.admin_keys, admin_keys, shown);
        self.front(&old.front, front);
    }

    /// API keys and certificates may change.
    fn front(&mut self, old: &FrontConfig, new: &FrontConfig) {
        let FrontConfig { api_keys: _, api_key_file: _, metrics, cors, limits, tls, unix_socket, tcp, drain_grace } =
            new;
        self.plain("server.metrics_access", &old.metrics, metrics);
        self.field("server.cors_*", &old.cors, cors, |cors| if cors.is_some() { "these" } else { "none" }.into());
        let on = |tls: &bool| if *tls { "some" } else { "none" }.into();
        self.field("server.tls", &old.tls.is_some(), &tls.is_some(), on);
        self.optional("server.unix_socket", &old.unix_socket, unix_socket);
        self.plain("server.tcp", &old.tcp, tcp);
        self.plain("server.drain_grace_s", &old.drain_grace.as_secs_f64(), &drain_grace.as_secs_f64());
        self.limits(&old.limits, limits);
    }

    fn limits(&mut self, old: &Limits, new: &Limits) {
        let Limits {
            connections,
            connections_per_peer,
            url_bytes,
            headers,
            header_bytes,
            header_timeout,
            // The same for all.
            idle_timeout: _,
            body_timeout,
            write_timeout,
            request_timeout,
            requests_per_client,
            queued_requests,
            queued_tokens,
        } = new;
        self.plain("server.max_connections", &old.connections, connections);
        self.optional("server.max_connections_per_peer", &old.connections_per_peer, connections_per_peer);
        self.plain("server.max_url_bytes", &old.url_bytes, url_bytes);
        self.plain("server.max_headers", &old.headers, headers);
        self.plain("server.max_header_bytes", &old.header_bytes, header_bytes);
        self.plain("server.header_timeout_s", &old.header_timeout.as_secs_f64(), &header_timeout.as_secs_f64());
        self.plain("server.body_timeout_s", &old.body_timeout.as_secs_f64(), &body_timeout.as_secs_f64());
        self.plain("server.write_timeout_s", &old.write_timeout.as_secs_f64(), &write_timeout.as_secs_f64());
        let seconds = |time: &Option<Duration>| time.map(|time| time.as_secs_f64());
        self.optional("server.request_timeout_s", &seconds(&old.request_timeout), &seconds(request_timeout));
        self.optional("server.max_requests_per_client", &old.requests_per_client, requests_per_client);
        self.plain("server.max_queued_requests", &old.queued_requests, queued_requests);
        self.optional("server.max_queued_tokens", &old.queued_tokens, queued_tokens);
    }

    fn gpu(&mut self, old: GpuConfig, new: GpuConfig) {
        let GpuConfig { memory_fraction, graphs } = new;
        self.plain("gpu.memory_fraction", &old.memory_fraction, &memory_fraction);
        self.plain("gpu.graphs", &old.graphs, &graphs);
    }

    fn batching(&mut self, old: BatchingConfig, new: BatchingConfig) {
        let BatchingConfig { schedule, online } = new;
        self.field("batching.schedule", &old.schedule, &schedule, |schedule| format!("\"{}\"", schedule.name()));
        let mode = |online: &bool| if *online { "\"online\"" } else { "\"fixed\"" }.into();
        self.field("batching.mode", &old.online.is_some(), &online.is_some(), mode);
        if let (Some(old), Some(new)) = (old.online, online) {
            let crate::online::Settings { interval, p99_tpot_ms, p99_ttft_ms } = new;
            self.plain("batching.interval_s", &old.interval.as_secs_f64(), &interval.as_secs_f64());
            self.optional("batching.p99_tpot_ms", &old.p99_tpot_ms, &p99_tpot_ms);
            self.optional("batching.p99_ttft_ms", &old.p99_ttft_ms, &p99_ttft_ms);
        }
    }

    /// Under `online` the ladder is where the tuner began.
    fn model(&mut self, old: &ModelConfig, new: &ModelConfig, online: bool) {
        let ModelConfig {
            name,
            path,
            weights,
            device,
            dtype,
            min_batch,
            max_wait: _,
            hold: _,
            pool,
            max_rows,
            prefill_chunk,
            multiprocessors,
            prefix_cache,
            context,
            masked_tokens,
        } = new;
        let key = |key: &str| format!("models.{name}.{key}");
        self.plain(key("path"), &old.path, path);
        let shape = |weights: &Weights| match weights {
            Weights::Directory => "none".into(),
            Weights::Random(shape) => format!("{:?}", shape.name),
        };
        self.field(key("shape"), &old.weights, weights, shape);
        let place = |device: &DeviceChoice| match device {
            DeviceChoice::Auto => "\"auto\"".into(),
            DeviceChoice::Cpu => "\"cpu\"".into(),
            DeviceChoice::Cuda(ordinal) => format!("\"cuda:{ordinal}\""),
        };
        self.field(key("device"), &old.device, device, place);
        self.field(key("dtype"), &old.dtype, dtype, |dtype| format!("\"{dtype:?}\"").to_lowercase());
        if online {
            self.plain(key("min_batch"), &old.min_batch, min_batch);
        }
        let written = |pool: &Pool| match pool {
            Pool::Pages(pages) => pages.to_string(),
            Pool::Tokens(tokens) => tokens.to_string(),
            Pool::Bytes(bytes) => format!("{bytes} bytes"),
        };
        let named = pool.or(old.pool).map_or("kv_memory", Pool::key);
        self.field(key(named), &old.pool, pool, |pool| match pool {
            None => "none".into(),
            Some(pool) if pool.key() == named => written(pool),
            Some(pool) => format!("{} = {}", pool.key(), written(pool)),
        });
        self.optional(key("max_rows"), &old.max_rows, max_rows);
        self.optional(key("prefill_chunk"), &old.prefill_chunk, prefill_chunk);
        self.optional(key("multiprocessors"), &old.multiprocessors, multiprocessors);
        self.plain(key("prefix_cache"), &old.prefix_cache, prefix_cache);
        self.optional(key("context"), &old.context, context);
        self.plain(key("masked_tokens"), &old.masked_tokens, masked_tokens);
    }

    fn traces(&mut self, old: Option<&TraceSettings>, new: Option<&TraceSettings>) {
        let endpoint = |traces: Option<&TraceSettings>| traces.map(|traces| traces.endpoint.to_string());
        self.optional("traces.endpoint", &endpoint(old), &endpoint(new));
        if let (Some(old), Some(new)) = (old, new) {
            let TraceSettings { endpoint: _, sample, service_name } = new;
            self.plain("traces.sample", &old.sample, sample);
            self.plain("traces.service_name", &old.service_name, service_name);
        }
    }

    fn record(&mut self, old: Option<&RecordConfig>, new: Option<&RecordConfig>) {
        let directory = |record: &Option<&RecordConfig>| record.map(|record| record.directory.clone());
        self.optional("record.directory", &directory(&old), &directory(&new));
        if let (Some(old), Some(new)) = (old, new) {
            let RecordConfig { directory: _, max_bytes, shard_rows, hidden, top_k, routes, sample, requests } = new;
            self.plain("record.max_bytes", &old.max_bytes, max_bytes);
            self.plain("record.shard_rows", &old.shard_rows, shard_rows);
            self.plain("record.hidden", &old.hidden, hidden);
            self.plain("record.top_k", &old.top_k, top_k);
            self.optional("record.routes", &old.routes, routes);
            self.plain("record.sample", &old.sample, sample);
            self.plain("record.requests", &old.requests, requests);
        }
    }
}
