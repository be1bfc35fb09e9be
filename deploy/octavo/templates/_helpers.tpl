{{- /* Labels that select a part's Pods. Argument: (dict "part" "engine" "root" $). */ -}}
{{- define "octavo.selector" -}}
app.kubernetes.io/name: octavo-{{ .part }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "octavo.labels" -}}
{{ include "octavo.selector" . }}
app.kubernetes.io/part-of: octavo
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "octavo.metadata" -}}
name: {{ .root.Release.Name }}-{{ .part }}
namespace: {{ .root.Release.Namespace }}
labels: {{- include "octavo.labels" . | nindent 2 }}
{{- end }}

{{- /* A ConfigMap's data; everything is text. Argument: a dict. */ -}}
{{- define "octavo.settings" -}}
{{- range $name, $value := . }}
{{ $name }}: {{ $value | toString | quote }}
{{- end }}
{{- end }}

{{- define "octavo.routerSettings" -}}
{{- $engine := printf "dns:///%s-engine:50052" .Release.Name }}
{{- if eq .Values.router.discovery "kubernetes" }}
{{- $labels := list "app.kubernetes.io/name=octavo-engine" (printf "app.kubernetes.io/instance=%s" .Release.Name) }}
{{- if gt (int .Values.engine.ranks) 1 }}
{{- $labels = append $labels "leaderworkerset.sigs.k8s.io/worker-index=0" }}
{{- end }}
{{- $engine = printf "kubernetes:///%s:50052" (join "&" $labels) }}
{{- end }}
{{- $settings := dict "OCTAVO_ENGINE" $engine "OCTAVO_HTTP_PORT" 8000
  "OCTAVO_DRAIN_TIMEOUT" .Values.router.drainSeconds "OCTAVO_MAX_CONNECTION_AGE" 600 }}
{{- if .Values.router.tls.enabled }}
{{- $_ := merge $settings (dict "OCTAVO_TENANTS" "/run/tenants/tenants.toml"
  "OCTAVO_TLS_CERT" "/run/tls/tls.crt" "OCTAVO_TLS_KEY" "/run/tls/tls.key") }}
{{- end }}
{{- include "octavo.settings" (mergeOverwrite $settings .Values.router.settings) }}
{{- end }}

{{- define "octavo.engineSettings" -}}
{{- $settings := dict "OCTAVO_MODEL" .Values.model "OCTAVO_DRAIN_TIMEOUT" .Values.engine.drainSeconds }}
{{- if gt (int .Values.engine.gpus) 0 }}
{{- $_ := set $settings "OCTAVO_DEVICE" "cuda" }}
{{- end }}
{{- if gt (int .Values.engine.ranks) 1 }}
{{- $_ := set $settings "OCTAVO_TENSOR_PARALLEL_SIZE" .Values.engine.ranks }}
{{- end }}
{{- include "octavo.settings" (mergeOverwrite $settings .Values.engine.settings) }}
{{- end }}

{{- /* What every Pod of ours has. Argument: (dict "part" "engine" "root" $). */ -}}
{{- define "octavo.podSecurity" -}}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  fsGroup: 1000
  {{- if eq .part "engine" }}
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "octavo.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "octavo.topologySpread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "octavo.selector" . | nindent 8 }}
{{- end }}

{{- define "octavo.environment" -}}
envFrom:
  - configMapRef: {name: {{ .root.Release.Name }}-{{ .part }}}
env:
  - name: HF_TOKEN
    valueFrom:
      secretKeyRef: {name: {{ .root.Values.huggingFaceSecret }}, key: token, optional: true}
{{- end }}

{{- define "octavo.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {{- include "octavo.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "octavo.selector" . | nindent 6 }}
{{- end }}
