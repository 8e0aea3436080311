//! The stationary distribution of a sparse chain.

use super::states::{Groups, States};

/// Groups up to which the distribution over the groups is solved for between sweeps.
const MOST_GROUPS: usize = 400;
/// Sweeps between two such corrections.
const SWEEPS: usize = 4;

/// Transitions by target.
pub(super) struct Incoming {
    starts: Vec<usize>,
    sources: Vec<u32>,
    probabilities: Vec<f64>,
    /// By state: probability of staying.
    loops: Vec<f64>,
}

impl Incoming {
    pub fn new(states: &States) -> Self {
        let count = states.count;
        let mut starts = vec![0; count + 1];
        let mut loops = vec![0.0; count];
        let transitions =
            || (0..count).flat_map(|from| (states.starts[from]..states.starts[from + 1]).map(move |at| (from, at)));
        for (from, at) in transitions() {
            let to = states.targets[at] as usize;
            if to == from {
                loops[to] += states.probabilities[at];
            } else {
                starts[to + 1] += 1;
            }
        }
        for to in 0..count {
            starts[to + 1] += starts[to];
        }
        let mut next = starts.clone();
        let (mut sources, mut probabilities) = (vec![0; starts[count]], vec![0.0; starts[count]]);
        for (from, at) in transitions() {
            let to = states.targets[at] as usize;
            if to != from {
                sources[next[to]] = from as u32;
                probabilities[next[to]] = states.probabilities[at];
                next[to] += 1;
            }
        }
        Self { starts, sources, probabilities, loops }
    }

    fn of(&self, to: usize) -> impl Iterator<Item = (usize, f64)> + '_ {
        let range = self.starts[to]..self.starts[to + 1];
        self.sources[range.clone()].iter().map(|s| *s as usize).zip(self.probabilities[range].iter().copied())
    }

    /// One Gauss-Seidel sweep of x = x P; the change, by the sum of x.
    fn sweep(&self, x: &mut [f64]) -> f64 {
        let (mut change, mut sum) = (0.0, 0.0);
        for to in 0..x.len() {
            let stays = self.loops[to];
            let new = match stays < 1.0 {
                true => self.of(to).map(|(from, p)| p * x[from]).sum::<f64>() / (1.0 - stays),
                false => x[to],
            };
            change += (new - x[to]).abs();
            sum += new;
            x[to] = new;
        }
        x.iter_mut().for_each(|x| *x /= sum);
        change / sum
    }

    /// Give each group the weight that it has in the chain over groups that `x` implies. Gauss-Seidel alone
    /// takes thousands of sweeps for it where requests, or the sizes of batches, drift slowly.
    fn correct(&self, x: &mut [f64], groups: &Groups) {
        let Groups { of: groups, count } = groups;
        let count = *count;
        let mut flow = vec![0.0; count * count];
        let mut mass = vec![0.0; count];
        for to in 0..x.len() {
            let group = groups[to] as usize;
            mass[group] += x[to];
            for (from, p) in self.of(to) {
                flow[groups[from] as usize * count + group] += x[from] * p;
            }
        }
        for from in 0..count {
            if mass[from] > 0.0 {
                flow[from * count..(from + 1) * count].iter_mut().for_each(|f| *f /= mass[from]);
            }
        }
        let Some(weights) = eliminate(&mut flow, count) else { return };
        for (x, group) in x.iter_mut().zip(groups) {
            let group = *group as usize;
            if mass[group] > 0.0 {
                *x *= weights[group] / mass[group];
            }
        }
    }

    /// The distribution, and the sweeps it took; `None` if `most` sweeps do not bring the change below
    /// `tolerance`.
    pub fn stationary(&self, groups: &[Groups], tolerance: f64, most: usize) -> Option<(Vec<f64>, usize)> {
        let count = self.loops.len();
        let useful: Vec<&Groups> =
            groups.iter().filter(|g| (2..=MOST_GROUPS).contains(&g.count) && g.count < count).collect();
        let mut x = vec![1.0 / count as f64; count];
        for sweep in 1..=most {
            if self.sweep(&mut x) < tolerance {
                return Some((x, sweep));
            }
            if sweep % SWEEPS == 0 && !useful.is_empty() {
                self.correct(&mut x, useful[sweep / SWEEPS % useful.len()]);
            }
        }
        None
    }
}

/// Stationary distribution of a dense chain (rows of `p`; the diagonal is not read), without subtractions
/// (Grassmann, Taksar and Heyman). `None` where a state that is left over leads nowhere.
fn eliminate(p: &mut [f64], count: usize) -> Option<Vec<f64>> {
    for last in (1..count).rev() {
        let out: f64 = p[last * count..last * count + last].iter().sum();
        if out <= 0.0 {
            return None;
        }
        for from in 0..last {
            let share = p[from * count + last] / out;
            p[from * count + last] = share;
            if share > 0.0 {
                for to in 0..last {
                    p[from * count + to] += share * p[last * count + to];
                }
            }
        }
    }
    let mut weights = vec![1.0; count];
    for state in 1..count {
        weights[state] = (0..state).map(|from| weights[from] * p[from * count + state]).sum();
    }
    let sum: f64 = weights.iter().sum();
    weights.iter_mut().for_each(|w| *w /= sum);
    Some(weights)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dense_chain() {
        // Birth and death: 0 <-> 1 <-> 2.
        let mut p = [0.5, 0.5, 0.0, 0.25, 0.5, 0.25, 0.0, 0.5, 0.5];
        let weights = eliminate(&mut p, 3).unwrap();
        for (weight, expected) in weights.iter().zip([0.25, 0.5, 0.25]) {
            assert!((weight - expected).abs() < 1e-15);
        }
        assert_eq!(eliminate(&mut [0.0, 1.0, 0.0, 1.0], 2), None);
    }
}
